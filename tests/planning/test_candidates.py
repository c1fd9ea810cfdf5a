"""What the user asks for becomes degrees and devices, or one sentence with the numbers and the way out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_runtime.demo import HEADS
from parallel_runtime.errors import Refused
from parallel_runtime.explain.plan_words import unused
from parallel_runtime.group.machines import checked_plan
from parallel_runtime.planning.candidates import default_plan
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.request_checks import check_step_cache, degrees_in_words
from parallel_runtime.planning.resolve import resolve
from parallel_runtime.planning.run_plan import DeviceProfile, PlanInputs
from parallel_runtime.request import MAX_CPU_WORKERS, EngineOptions, ParallelRequest, parse_devices, why_one_gpu
from parallel_runtime.specs import Parallelism

OF_24_HEADS, UNET = NetworkStats(heads=24), NetworkStats(name="UNet", divisible=False)


def planned(*, heads=24, gpus=0, **request):
    division = checked_plan(
        PlanInputs(request=ParallelRequest.of(request), network=NetworkStats(heads=heads), gpus=gpus)
    )
    return division.degrees.ring_degree, division.degrees.ulysses_degree, division.placement.devices


def test_without_gpus_and_without_wishes_there_is_one_worker_on_the_cpu():
    assert planned() == (1, 1, ("cpu",))


def test_every_gpu_is_used_with_ulysses_first():
    assert planned(gpus=4) == (1, 4, ("cuda:0", "cuda:1", "cuda:2", "cuda:3"))


@pytest.mark.parametrize(
    ("gpus", "heads", "degrees"), [(8, 12, (2, 4)), (3, 40, (3, 1)), (5, 24, (5, 1)), (6, 30, (1, 6)), (4, 2, (2, 2))]
)
def test_what_the_heads_do_not_divide_goes_to_the_ring(gpus, heads, degrees):
    assert planned(gpus=gpus, heads=heads)[:2] == degrees


def test_the_degree_that_is_given_decides_the_other():
    assert planned(gpus=4, ring_degree=2)[:2] == (2, 2)
    assert planned(gpus=4, ulysses_degree=2)[:2] == (2, 2)
    assert planned(ring_degree=2) == (2, 1, ("cpu", "cpu"))
    assert planned(ulysses_degree=2, ring_degree=2)[2] == ("cpu",) * 4


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 4, 5, 8])
def test_the_example_runs_as_it_is_on_any_number_of_gpus(gpus):
    example = Path(__file__).parents[2] / "example_workflows" / "01 Demo, the same picture twice.json"
    nodes = json.loads(example.read_text(encoding="utf-8"))["nodes"]
    (config,) = (node for node in nodes if node["type"] == "CPParallelConfig")
    request = ParallelRequest.of(config["widgets_values_named"])
    assert checked_plan(
        PlanInputs(request=request, network=NetworkStats(heads=HEADS), gpus=gpus, guided=True)
    ).placement.world_size == max(1, gpus)


def test_only_the_devices_that_are_needed_are_taken():
    assert planned(gpus=8, ring_degree=1, ulysses_degree=2)[2] == ("cuda:0", "cuda:1")
    assert planned(gpus=8, devices="3, cuda:5")[2] == ("cuda:3", "cuda:5")
    assert planned(gpus=1, devices="0,0")[2] == ("cuda:0", "cuda:0")


def test_heads_need_not_divide():
    assert planned(gpus=5, heads=24, ulysses_degree=5, ring_degree=1)[:2] == (1, 5)


@pytest.mark.parametrize(
    ("request_", "heads", "gpus", "sentence"),
    [
        ({"ring_degree": 3, "ulysses_degree": 3}, 24, 2,
         r"ring_degree 3 x ulysses_degree 3 needs 9 workers, but there are 2 devices: cuda:0, cuda:1. "
         r"The nearest that works is ring_degree 1 x ulysses_degree 2"),
        ({"cfg_degree": 2, "ring_degree": 1, "ulysses_degree": 1}, 24, 1, "cfg_degree 2 needs 2.*ulysses_degree 1; or"),
        ({"data_degree": 8}, 24, 4, "x data_degree 8 needs 8.*x data_degree 4$"),
        ({"devices": "cpu,cpu,cpu", "ring_degree": 2}, 24, 0, "needs 2 worker.*or set ring_degree to 0"),
        ({"devices": "0,1,2", "pipeline_degree": 2}, 24, 3, "devices names 3 .*needs 2.*or set pipeline_degree to 0"),
        ({"ring_degree": 2, "devices": "cpu"}, 24, 0, r"needs 2 workers, but there is 1 device: cpu"),
        ({"ulysses_degree": 4, "ring_degree": 1}, 2, 8, "2 attention heads over 4 .*ring_degree 1 x ulysses_degree 2$"),
        ({"ring_degree": MAX_CPU_WORKERS + 1}, 24, 0, "room for .* CPU workers"),
        (
            {"devices": "cuda:0"},
            24,
            0,
            "GPU 0 not found: ComfyUI sees no CUDA GPU; for a trial without a GPU write cpu,cpu",
        ),
        ({"devices": "0,7"}, 24, 2, "GPU 7 not found: ComfyUI sees GPUs 0 to 1"),
        ({"devices": "0,cpu"}, 24, 2, "'0,cpu' mixes CPU and GPUs"),
        ({"devices": "tpu"}, 24, 2, "'tpu' is not a device"),
        ({"attention_backend": "sage"}, 24, 0, "attention_backend sage needs CUDA GPUs"),
        ({"attention_backend": "sage"}, 24, 1, "needs the package sageattention"),
        ({"ring_degree": 1, "ulysses_degree": 1, "cfg_degree": 2, "data_degree": 3}, 24, 2, "x data_degree 3 needs 6"),
        ({"devices": "9" * 5000}, 24, 1, "devices: '9{78}… is not a device"),
        ({"shares": "3,2,1"}, 24, 2, r"shares '3,2,1' has 3 number.s. for 2 worker.s.; write 2, one per device"),
        ({"shares": "3"}, 24, 4, r"shares '3' has 1 number.s. for 4 worker.s.; write 4"),
        ({"shares": "3;2"}, 24, 2, "shares '3;2' is unknown: write auto, equal, or a whole number for each worker"),
        ({"shares": "3,-2"}, 24, 2, "a whole number for each worker"),
        ({"shares": "0,0"}, 24, 2, "shares 0,0 gives a prompt or an image to nobody"),
        ({"shares": "1,1,0,0", "data_degree": 2}, 24, 4, "one worker of each group a share above 0, or set shares"),
        ({"shares": "9" * 5000 + ",1"}, 24, 2, "shares '9{78}… is unknown: write auto"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_sentence(request_, heads, gpus, sentence):
    with pytest.raises(Refused, match=sentence):
        planned(heads=heads, gpus=gpus, **request_)


@pytest.mark.parametrize(
    ("request_", "gpus", "heads", "fix"),
    [
        ({"ring_degree": 2, "ulysses_degree": 2}, 3, 24, {"ring_degree": 1}),
        ({"ring_degree": 2, "ulysses_degree": 2, "devices": "0,1,2"}, 3, 24, {"ring_degree": 1, "ulysses_degree": 3}),
        ({"ring_degree": 4, "ulysses_degree": 4}, 8, 24, {"ring_degree": 2}),
        ({"ring_degree": 1, "ulysses_degree": 4}, 8, 2, {"ulysses_degree": 2}),
        ({"ulysses_degree": 4}, 8, 2, {"ulysses_degree": 2}),
        ({"ring_degree": 2, "data_degree": 4}, 4, 24, {"ring_degree": 1}),
        ({"ring_degree": 2, "ulysses_degree": 1, "cfg_degree": 2}, 3, 24, {"ring_degree": 1}),
        ({"pipeline_degree": 4, "patches": 2}, 3, 24, {"pipeline_degree": 3}),
        ({"pipeline_degree": 4, "patches": 2, "ulysses_degree": 2}, 1, 24,
         {"ulysses_degree": 1, "pipeline_degree": 1, "patches": 1}),
        ({"ring_degree": 9, "ulysses_degree": 1, "nnodes": 2, "rdzv_endpoint": "127.0.0.1:1"}, 2, 24,
         {"ring_degree": 4}),
    ],
)  # fmt: skip
def test_a_button_changes_only_what_is_wrong(request_, gpus, heads, fix):
    """And the refusal's sentence says the degrees that auto makes of the request then."""
    inputs = PlanInputs(request=ParallelRequest.of(request_), network=NetworkStats(heads=heads), gpus=gpus, guided=True)
    with pytest.raises(Refused) as refused:
        default_plan(inputs)
    assert refused.value.fix == fix
    plan = default_plan(replace(inputs, request=inputs.request.with_values(fix)))
    assert f"The nearest that works is {degrees_in_words(plan.degrees)}" in str(refused.value)


def shares_of(gpus=2, **request):
    return checked_plan(PlanInputs(request=ParallelRequest.of(request), network=OF_24_HEADS, gpus=gpus)).degrees.shares


@pytest.mark.parametrize(
    ("shares", "come_to"), [("auto", ()), ("", ()), ("equal", (1, 1)), ("3,2", (3, 2)), (" 60 , 40 ", (60, 40))]
)
def test_shares_are_the_workers_in_their_order(shares, come_to):
    assert shares_of(shares=shares) == come_to


def test_workers_that_join_another_group_keep_their_shares():
    assert shares_of(cfg_degree=2, shares="3,2") == (3, 2)


def guided(gpus=2, network=OF_24_HEADS, **request):
    return checked_plan(PlanInputs(request=ParallelRequest.of(request), network=network, gpus=gpus, guided=True))


@pytest.mark.parametrize(("gpus", "shares"), [(2, "3,2"), (2, " 60 , 40 "), (4, "3,3,2,2"), (4, "3,2,3,2")])
def test_shares_of_a_run_with_two_prompts_divide_the_sequence_by_themselves(gpus, shares):
    division = guided(gpus, shares=shares)
    assert division.degrees.stage_mesh_shape == (1, 1, 1, gpus)
    total = sum(map(int, shares.split(",")))
    assert [percent for _, percent in division.work_percent] == [
        round(100 * int(own) / total) for own in shares.split(",")
    ]


@pytest.mark.parametrize("shares", ["auto", "equal", "", "2,2"])
def test_equal_shares_leave_each_prompt_its_half(shares):
    assert guided(shares=shares).degrees.cfg_degree == 2


@pytest.mark.parametrize(
    ("request_", "gpus", "remedy"),
    [
        ({"shares": "3,2"}, 2, "ring_degree 1 x ulysses_degree 2 with cfg_degree 1, or shares auto"),
        ({"shares": "3,2", "ring_degree": 1, "ulysses_degree": 1}, 8, "ring_degree 1 x ulysses_degree 2 with"),
        ({"shares": "3,3,2,2"}, 4, "ring_degree 1 x ulysses_degree 4 with"),
        ({"shares": "3,2,2,3", "data_degree": 2}, 4, "ring_degree 1 x ulysses_degree 2 x data_degree 2 with"),
        ({"shares": "3,2", "network": UNET}, 2, "ring_degree 1 x ulysses_degree 1 x data_degree 2 with"),
    ],
)
def test_shares_that_two_halves_with_a_prompt_each_leave_unused_are_refused_with_what_uses_them(request_, gpus, remedy):
    with pytest.raises(Refused, match=f"^shares {request_['shares']} divide nothing: .*choose {remedy}") as refused:
        guided(gpus, cfg_degree=2, **request_)
    mended = guided(gpus, **{**request_, "cfg_degree": 2, **refused.value.fix})
    assert mended.degrees.shares == tuple(map(int, request_["shares"].split(",")))


def test_one_list_of_shares_fits_a_run_on_all_devices_and_one_that_uses_fewer():
    """A VAE has rows for three devices where a network has two prompts for two."""
    assert shares_of(shares="3,2,1", ulysses_degree=2, gpus=3) == (3, 2)
    assert shares_of(shares="3,2", ulysses_degree=2, gpus=3) == (3, 2)
    assert shares_of(shares="3,2,1", gpus=3) == (3, 2, 1)
    rows = {"shares": "5,3,1", "data_degree": 2, "cfg_degree": 1, "network": UNET}
    assert guided(3, **rows).degrees.shares == (5, 3)
    with pytest.raises(Refused, match=r"has 4 number.s. for 2 worker.s.; write 2, one per device"):
        shares_of(shares="3,2,1,1", ulysses_degree=2, gpus=3)


@pytest.mark.parametrize(("gpus", "shares"), [(3, "3,2,1"), (2, "3,2"), (3, "3,2")])
def test_shares_that_are_a_vaes_alone_do_not_stop_a_network_that_shares_out_prompts(gpus, shares):
    division = guided(gpus, network=replace(UNET, name="SDXL"), shares=shares, devices=",".join(map(str, range(gpus))))
    assert (division.placement.devices, division.degrees.cfg_degree) == (("cuda:0", "cuda:1"), 2)
    assert division.degrees.shares == ()
    text = unused(ParallelRequest(shares=shares), division, "SDXL")
    assert text.startswith(f"shares {shares} divide nothing here: each worker has a whole prompt of SDXL")
    assert not unused(ParallelRequest(shares="1,1"), division, "SDXL")
    assert not unused(ParallelRequest(), division, "SDXL")


def test_percent_are_of_the_work_that_a_worker_has_where_each_half_has_one_prompt():
    within = guided(4, cfg_degree=2, shares="3,2,4,1")
    assert [percent for _, percent in within.work_percent] == [30, 20, 40, 10]
    within = guided(4, cfg_degree=2, shares="6,4,1,1")
    assert [percent for _, percent in within.work_percent] == [30, 20, 25, 25], "one half has no more than its prompt"
    images = guided(4, cfg_degree=2, data_degree=2, shares="3,3,2,2")
    assert [percent for _, percent in images.work_percent] == [30, 30, 20, 20]


def test_every_plan_uses_exactly_its_devices():
    for gpus in range(9):
        for heads in (1, 2, 3, 12, 24, 30):
            ring, ulysses, devices = planned(gpus=gpus, heads=heads)
            assert ring * ulysses == len(devices)
            assert ulysses <= heads
            assert len(devices) == max(1, gpus)


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("CP_CLUSTER_TOKEN", "sixteen characters")


MACHINES = {"nnodes": 2, "rdzv_endpoint": "127.0.0.1:29500"}


def test_every_machine_gives_as_many_devices_as_this_one():
    division = checked_plan(PlanInputs(request=ParallelRequest.of(MACHINES), network=OF_24_HEADS, gpus=4))
    degrees, placement = division.degrees, division.placement
    assert degrees.ulysses_degree == placement.world_size == 8
    assert placement.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert (placement.nnodes, placement.rdzv_endpoint) == (2, "127.0.0.1:29500")
    assert planned(**MACHINES) == (1, 2, ("cpu",))
    assert planned(ring_degree=2, ulysses_degree=2, **MACHINES) == (2, 2, ("cpu", "cpu"))
    assert planned(gpus=4, ring_degree=2, ulysses_degree=1, **MACHINES) == (2, 1, ("cuda:0",))


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"ring_degree": 3, "ulysses_degree": 1}, "makes 3 workers, which 2 machines cannot share evenly"),
        (
            {"ring_degree": 9, "ulysses_degree": 1},
            "2 machines has only .*The nearest that works is ring_degree 8 x",
        ),
        (
            {"rdzv_endpoint": "10.254.0.9:29500"},
            "no network interface of this machine has 10.254.0.9. It has: .*127.0.0.1",
        ),
        ({"rdzv_endpoint": "127.0.0.1:" + "9" * 5000}, "is not an address with a port"),
        ({"rdzv_endpoint": ""}, "several machines need rdzv_endpoint: an address of this one"),
        ({"rdzv_endpoint": "10.0.0.1"}, "rdzv_endpoint '10.0.0.1' is not an address with a port"),
        ({"devices": "0,1", "ring_degree": 2, "ulysses_degree": 1}, "devices names 2 .*1 worker.s. on each machine"),
    ],
)
def test_what_machines_cannot_share_is_refused(request_, sentence):
    with pytest.raises(Refused, match=sentence):
        planned(gpus=4, **{**MACHINES, **request_})


def test_planning_looks_up_no_name_which_may_take_a_minute(monkeypatch):
    def look_up(host):
        pytest.fail(f"{host} is looked up")

    monkeypatch.setattr("socket.gethostbyname", look_up)
    named = {**MACHINES, "rdzv_endpoint": "render-box.lan:29500"}
    plan = checked_plan(PlanInputs(request=ParallelRequest.of(named), gpus=1))
    assert plan.placement.rdzv_endpoint == "render-box.lan:29500"


def test_a_refusal_quotes_no_more_of_a_widget_than_a_line():
    """Any text can come with a workflow, and the page looks for its words."""
    for values in ({**MACHINES, "rdzv_endpoint": "x" * 20_000}, {"devices": "cpu," + "0," * 20_000}):
        with pytest.raises(Refused) as refused:
            planned(**values)
        assert len(str(refused.value)) < 300


def test_devices_are_read_as_people_write_them():
    assert parse_devices(" 0 , CUDA:1,", 2) == ("cuda:0", "cuda:1")
    assert parse_devices("cpu,cpu", 0) == ("cpu", "cpu")
    assert parse_devices("", 0) == ()


def test_guidance_takes_two_halves_of_the_gpus_and_gives_them_back_at_cfg_1():
    def shape(guided, gpus=4, heads=24, **request):
        return checked_plan(
            PlanInputs(request=ParallelRequest.of(request), network=NetworkStats(heads=heads), gpus=gpus, guided=guided)
        ).degrees.stage_mesh_shape

    assert shape(True) == (1, 2, 1, 2)
    assert shape(False) == (1, 1, 1, 4)
    assert shape(True, gpus=3) == (1, 1, 1, 3)
    assert shape(True, gpus=1) == (1, 1, 1, 1)
    assert shape(True, cfg_degree=1) == (1, 1, 1, 4)
    assert shape(True, ulysses_degree=4, ring_degree=1) == (1, 1, 1, 4)
    assert shape(True, ring_degree=2, ulysses_degree=1, cfg_degree=2) == (1, 2, 2, 1)
    assert shape(False, ring_degree=2, ulysses_degree=1, cfg_degree=2) == (1, 1, 2, 2)
    assert shape(False, ring_degree=1, ulysses_degree=2, cfg_degree=2, heads=2) == (1, 1, 2, 2)
    assert shape(True, data_degree=2) == (2, 2, 1, 1)
    assert shape(False, data_degree=2, gpus=0, ring_degree=1, ulysses_degree=1) == (2, 1, 1, 1)


def test_under_an_attention_of_another_node_there_is_no_ring():
    def shape(gpus, heads=24, guided=False, **request):
        asked = ParallelRequest.of(request)
        network = NetworkStats(heads=heads, no_lse="another")
        inputs = PlanInputs(request=asked, network=network, gpus=gpus, guided=guided)
        return checked_plan(inputs).degrees.stage_mesh_shape

    assert shape(4) == (1, 1, 1, 4)
    assert shape(4, guided=True) == (1, 2, 1, 2)
    assert shape(2, cfg_degree=2) == (1, 1, 1, 2)
    assert shape(4, cfg_degree=2, ulysses_degree=2) == (1, 1, 1, 4)
    assert shape(4, heads=2) == (1, 1, 1, 2)
    assert shape(4, ulysses_degree=2) == (1, 1, 1, 2)
    with pytest.raises(Refused, match=r"another gives no log-sum-exp, .* ring_degree is 2; set it to 1"):
        shape(4, ring_degree=2)


def test_degrees_check_themselves():
    with pytest.raises(ValueError, match="ring_degree starts at 1"):
        Parallelism(ring_degree=0)


def figures(name, **more):
    return NetworkStats(name=name, heads=24, layers=57, width=3072, weights=12, weight_bytes=24, item_bytes=2, **more)


@pytest.mark.parametrize(
    ("network", "threshold", "says"),
    [
        (figures("SDXL", divisible=False), 0.1, r"step_cache 0\.1: a SDXL model has no blocks .* set step_cache to 0"),
        (figures("Mochi", step_cacheable=False), 0.1, r"step_cache 0\.1: a Mochi model has no blocks"),
    ],
)
def test_a_step_cache_that_cannot_be_is_refused_by_name(network, threshold, says):
    with pytest.raises(Refused, match=says):
        check_step_cache(ParallelRequest(options=EngineOptions(step_cache=threshold)), network)
    check_step_cache(ParallelRequest(), network)
    check_step_cache(ParallelRequest.of({"step_cache": 0.1}), figures("Flux"))


def test_a_list_of_thousands_of_workers_is_refused():
    with pytest.raises(Refused, match="10000 are listed, and at most 64 workers can run on a machine"):
        checked_plan(
            PlanInputs(request=ParallelRequest(devices=",".join(["cpu"] * 10000)), network=OF_24_HEADS, gpus=0)
        )


@pytest.mark.parametrize(("guided", "shape"), [(True, (1, 2, 1, 1)), (False, (2, 1, 1, 1))])
def test_where_no_plan_cuts_the_sequence_one_prompt_leaves_the_rows_of_its_batch(guided, shape):
    division = checked_plan(PlanInputs(request=ParallelRequest(), network=UNET, gpus=4, guided=guided))
    assert division.degrees.stage_mesh_shape == shape
    assert division.placement.devices == ("cuda:0", "cuda:1"), "the same workers for both"


def test_where_one_worker_has_to_see_all_nobody_does_the_same_beside_it():
    division = checked_plan(
        PlanInputs(request=ParallelRequest(), network=UNET, gpus=4, guided=True, batch_coupled=True)
    )
    assert (division.degrees.stage_mesh_shape, division.placement.devices) == ((1, 1, 1, 1), ("cuda:0",))


@pytest.mark.parametrize("guided", [True, False])
def test_prompts_that_are_seen_together_share_the_sequence(guided):
    for request in (ParallelRequest(), ParallelRequest(cfg_degree=2)):
        division = checked_plan(
            PlanInputs(request=request, network=OF_24_HEADS, gpus=4, guided=guided, batch_coupled=True)
        )
        degrees = division.degrees
        assert (degrees.cfg_degree, degrees.context_parallel_size, len(division.placement.devices)) == (1, 4, 4)


def test_what_joins_the_sequence_is_cut_by_the_estimate_too():
    network = NetworkStats(name="Wan", heads=40, layers=10, width=5120, weights=10**9, weight_bytes=10**9, item_bytes=2)
    slow = DeviceProfile(bytes_per_second=1.2e10, flops_per_second=2.0**49)  # where a ring hides its transfers
    work, request = network.work(1, 200_000), ParallelRequest(cfg_degree=2)
    degrees = resolve(PlanInputs(request=request, network=network, gpus=4, work=work, profile=slow)).degrees
    assert (degrees.ring_degree, degrees.ulysses_degree) == (4, 1)


@pytest.fixture
def one_shown(monkeypatch):
    """As ComfyUI's main.py leaves it on Windows."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("sys.argv", ["main.py", "--listen"])


HIDDEN = "CUDA_VISIBLE_DEVICES is 0, which hides the other GPUs: start ComfyUI without it, or on Windows"


@pytest.mark.usefixtures("one_shown")
@pytest.mark.parametrize("request_", [{"devices": "0,1"}, {"ring_degree": 2}, {"cfg_degree": 2, "data_degree": 2}])
def test_where_comfyui_hides_gpus_that_are_asked_for_the_way_to_them_is_said(request_):
    with pytest.raises(Refused, match=HIDDEN):
        planned(gpus=1, **request_)


@pytest.mark.usefixtures("one_shown")
def test_other_refusals_say_nothing_of_hidden_gpus():
    for gpus, request_ in (
        (0, {"devices": "cuda:0"}),
        (2, {"devices": "0,7"}),
        (1, {"devices": "cpu", "ring_degree": 2}),
    ):
        with pytest.raises(Refused) as refused:
            planned(gpus=gpus, **request_)
        assert "Windows" not in str(refused.value)


@pytest.mark.parametrize("shown", [None, "", "1", "0,1"])
def test_gpus_that_the_user_chose_are_not_hidden(monkeypatch, shown):
    monkeypatch.setattr("sys.argv", ["main.py"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert why_one_gpu(1) == ""


@pytest.mark.usefixtures("one_shown")
@pytest.mark.parametrize("flags", [["--cuda-device", "0"], ["--cuda-device=0"]])
def test_nor_are_they_where_cuda_device_says_so(monkeypatch, flags):
    assert why_one_gpu(1)
    assert why_one_gpu(2) == why_one_gpu(0) == ""
    monkeypatch.setattr("sys.argv", ["main.py", *flags])
    assert why_one_gpu(1) == ""
