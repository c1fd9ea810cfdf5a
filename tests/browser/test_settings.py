"""What ComfyUI's Settings show of this pack, and numbers as the user's language writes them."""

from __future__ import annotations

from typing import Any

import pytest

NAMES = [
    "Default devices",
    "Default ring_degree",
    "Default ulysses_degree",
    "Start workers when ComfyUI starts",
    "End idle workers after (seconds)",
    "Give up on a silent worker after (seconds)",
    "Log level",
]
DIGITS = "async () => (await import('/extensions/context-parallel-sampler/seconds.js')).digits(1234.5)"


def test_settings_begin_with_the_devices_and_end_with_the_log(page: Any) -> None:
    page.evaluate("() => { void app.extensionManager.command.execute('Comfy.ShowSettingsDialog') }")
    page.get_by_role("dialog").get_by_text("CP Sampler", exact=True).first.click()
    page.get_by_text(NAMES[-1], exact=True).wait_for()
    tops = [page.get_by_text(name, exact=True).bounding_box()["y"] for name in NAMES]
    assert tops == sorted(tops)


@pytest.mark.parametrize("page", [{"Comfy.Locale": "fr"}], indirect=True)
def test_a_french_number_has_a_comma(page: Any) -> None:
    assert page.evaluate(DIGITS) == "1234,5"
