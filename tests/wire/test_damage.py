"""Damaged and lying bytes are what they say, or a ProtocolError; never anything else, and never a leak."""

import json
import os
import random

import torch

from parallel_runtime.errors import ProtocolError
from parallel_runtime.wire.bundles import read_bundle, write_bundle
from parallel_runtime.wire.messages import decode, encode

from .test_wire import MESSAGES

JUNK = [None, True, -1, 2**70, 0.5, "x", "__metadata__", [], [[0, 8]], {}, {"tensor": "9"}, {"list": 3}, "[" * 100_000]


def test_damaged_messages_are_messages_or_protocol_errors():
    generator = random.Random(0)
    for _ in range(2000):
        data = bytearray(encode(generator.choice(MESSAGES)))
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            assert type(decode(bytes(data))) in {type(message) for message in MESSAGES}
        except ProtocolError:
            continue


def test_damaged_bundles_are_values_or_protocol_errors():
    generator = random.Random(0)
    fd = write_bundle({"x": torch.ones(4), "y": [1, "two"]})
    good = os.pread(fd, 1 << 20, 0)
    os.close(fd)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(500):
        data = bytearray(good[: generator.choice([len(good), generator.randrange(len(good))])])
        for _ in range(generator.randint(0, 4)):
            if data:
                data[generator.randrange(min(len(data), 200))] = generator.randrange(256)
        damaged = os.memfd_create("damaged")
        os.write(damaged, data)
        try:
            read_bundle(damaged)
        except ProtocolError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


def test_bundles_whose_header_lies_are_values_or_protocol_errors():
    """Every place in the header, and in the tree that it carries, says something else."""
    fd = write_bundle({"x": torch.ones(4), "y": [1, {"two": torch.zeros(2, 3)}]})
    good = os.pread(fd, 1 << 20, 0)
    os.close(fd)
    length = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    before = len(os.listdir("/proc/self/fd"))
    for lie in [*lies(header), *with_tree(header)]:
        text = json.dumps(lie).encode()
        damaged = os.memfd_create("damaged")
        os.write(damaged, len(text).to_bytes(8, "little") + text + data)
        try:
            read_bundle(damaged)
        except ProtocolError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


def with_tree(header):
    tree = json.loads(header["__metadata__"]["tree"])
    texts = ["[" * 100_000, *(json.dumps(lie) for lie in lies(tree))]
    return [{**header, "__metadata__": {"tree": text}} for text in texts]


def lies(value):
    """`value` with each of its parts, in turn, replaced by junk, left out or doubled."""
    yield from JUNK
    if isinstance(value, dict):
        for key, part in value.items():
            rest = {other: value[other] for other in value if other != key}
            yield from ({**rest, key: lie} for lie in lies(part))
            yield from (rest, {**value, "more": part})
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield from ([*value[:index], lie, *value[index + 1 :]] for lie in lies(part))
            yield from (value[:index], [*value, part])
