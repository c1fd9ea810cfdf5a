"""What crosses between processes arrives as it was sent, or is refused."""

import fcntl
import json
import os
import resource
import socket

import pytest
import torch

from parallel_runtime.errors import Cause, ProtocolError, Refused
from parallel_runtime.request import EngineOptions
from parallel_runtime.specs import ComfySetup, ModelSpec, Parallelism, SourceFile, WeightPlacement
from parallel_runtime.wire import bundles
from parallel_runtime.wire.bundles import read_bundle, write_bundle
from parallel_runtime.wire.channel import Channel
from parallel_runtime.wire.messages import (
    PACKET_BYTES,
    Cancel,
    Denied,
    Done,
    Ended,
    Failed,
    Heartbeat,
    Invitation,
    Joined,
    Machine,
    Measure,
    Ready,
    Run,
    Step,
    Welcome,
    decode,
    encode,
)

MODEL = ModelSpec(
    loader="comfy.sd:load_diffusion_model", arguments='["/models/é wan.safetensors"]', index=0, weight_dtype="bfloat16",
    files=(SourceFile(path="/models/é wan.safetensors", size=1, mtime_ns=2),), compute_dtype="float32",
    patches_fingerprint="abc",
)  # fmt: skip
MESSAGES = [
    Welcome("cuda:0", "/tmp/store", False, ComfySetup(root="/comfy", flags=("--cpu", "--port", "1"))),
    Welcome("cpu", "/tmp/store", True, None),
    Run(
        3,
        MODEL,
        Parallelism(ring_degree=2, ulysses_degree=4, options=EngineOptions(rotate_method="allgather")),
        WeightPlacement(mode="shard"),
    ),
    Cancel(3),
    Ready(1, 99, "token", "1f2e"),
    Joined(1e12, 0.0),
    Measure(3),
    Measure(3, MODEL, after="offload"),
    Measure(3, degrees=Parallelism(ring_degree=2), sharded=True),
    Heartbeat(1),
    Heartbeat(1, 0.5),
    Step(1, 0, 20),
    Done(1, seconds=2),
    Failed(Cause(kind="raised", rank=0), {"code": "died.error", "values": {"error": "x", "where": "y"}}, "Traceback"),
    Machine(("PyTorch 2.13",), "0,1", 2, "/comfy"),
    Invitation(1, 2, 4, 40000, "token"),
    Denied("why"),
    Ended((Cause(kind="killed", rank=1, signal="SIGKILL"), Cause(kind="exited", rank=0, exit_code=3))),
    Ended(error="OSError: no", last_line="a line"),
]


@pytest.fixture
def channels():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pair = Channel(left), Channel(right)
    yield pair
    for channel in pair:
        channel.close()


@pytest.fixture
def high(channels):
    """A channel whose descriptor is above 1,023, as in a process with many open files."""
    left, _ = channels
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most[1], most[1]))
    if most[1] != resource.RLIM_INFINITY and most[1] < 2000:
        pytest.skip("this user may not have so many files open")
    channel = Channel(socket.socket(fileno=fcntl.fcntl(left.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500)))
    yield channel
    channel.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, most)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"{}", b'{"type": "Evil"}', b'{"type": "Cancel"}', b"\xff\xfe",
        b'{"type": "Cancel", "job": "1"}', b'{"type": "Cancel", "job": 1, "more": 2}', b'{"type": [], "job": 1}',
        encode(MESSAGES[2]).replace(b'"ring_degree": 2', b'"ring_degree": 0'),
        encode(MESSAGES[2]).replace(b'"allgather"', b'"carrier pigeon"'),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ProtocolError):
        decode(data)


def test_a_bundle_brings_back_every_kind_of_value():
    shared = torch.arange(6.0)
    value = {
        "plain": [None, True, 3, 2.5, "text", (1, (2, "x"))],
        "views": [shared, shared[1:4], shared.view(2, 3).t()],
        "dtypes": [torch.tensor([1, 0, 1], dtype=dtype) for dtype in (torch.bool, torch.int8, torch.int64)],
        "halves": [torch.tensor([1.5, -2.0], dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)],
        "empty": torch.zeros(2, 0, 3),
        "scalar": torch.tensor(4.0),
        7: {"nested": {}},
    }

    back = read_bundle(write_bundle(value))

    assert json.dumps(value["plain"]) == json.dumps(back["plain"])
    assert back["plain"][5] == (1, (2, "x"))
    assert back[7] == {"nested": {}}
    for name in ("views", "dtypes", "halves"):
        for sent, got in zip(value[name], back[name], strict=True):
            assert sent.dtype == got.dtype
            assert torch.equal(sent, got)
    assert back["empty"].shape == (2, 0, 3)
    assert back["scalar"].item() == 4.0


def test_a_reader_may_write_without_touching_anybody_else():
    fd = write_bundle({"x": torch.zeros(3)})
    first, second = read_bundle(os.dup(fd)), read_bundle(fd)
    first["x"][0] = 1
    assert second["x"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"positive": [{"control": object()}]}, "value.positive[0].control is a builtins.object"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "value.x is a tensor of torch.complex64"),
        ({"x": {None: 1}}, "value.x has a key of type NoneType"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(value, named):
    with pytest.raises(Refused, match=named.replace("[", r"\[").replace("]", r"\]")):
        write_bundle(value)


def test_too_large_a_bundle_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr(bundles, "LIMIT", 1000)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused, match="and the limit is"):
        write_bundle({"x": torch.zeros(1000)})
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_longest_report_of_a_failure_fits_into_a_packet(channels):
    left, right = channels
    try:
        raise RuntimeError("🔥" * 20_000)
    except RuntimeError as error:
        failed = Failed.of(1, error)
    left.send(failed)
    assert right.receive() == (failed, None)
    assert failed.sentence.startswith("RuntimeError: 🔥")


@pytest.mark.parametrize(
    "single", [torch.tensor(2.5).expand(1), torch.arange(6.0)[2:3].as_strided((1,), (0,))], ids=str
)
def test_a_single_number_travels_whatever_its_stride_is(single):
    assert single.stride() == (0,)
    assert torch.equal(read_bundle(write_bundle({"sigma": single}))["sigma"], single)


def test_a_bundle_goes_along_with_a_message(channels):
    left, right = channels
    left.send(Step(1, 2, 3), write_bundle({"x0": torch.ones(2)}))
    message, bundle = right.receive()
    assert message == Step(1, 2, 3)
    assert read_bundle(bundle)["x0"].tolist() == [1, 1]


def test_the_other_side_hanging_up_is_the_end_of_file(channels):
    left, right = channels
    left.send(Cancel(1))
    left.close()
    assert right.receive() == (Cancel(1), None)
    assert right.hung_up()
    with pytest.raises(EOFError):
        right.receive()
    right.close()
    assert right.hung_up(0), "closed here"


def test_a_descriptor_above_1023_is_waited_for_like_any_other(channels, high):
    assert not high.waiting()
    assert high.greeting(Cancel, 0) is None
    channels[1].send(Cancel(1))
    assert high.waiting()
    assert high.greeting(Cancel, 5) == Cancel(1)
    assert not high.hung_up(0)


def test_an_offer_to_a_reader_that_is_behind_is_dropped_and_leaks_nothing(channels):
    left, right = channels
    before = len(os.listdir("/proc/self/fd"))
    offers = [left.offer(Step(1, step, 9), write_bundle({"x": torch.ones(2)})) for step in range(2000)]
    assert offers[0]
    assert not offers[-1]
    for _ in range(sum(offers)):
        _, bundle = right.receive()
        os.close(bundle)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_packet_that_is_too_long_is_refused():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET_BYTES)
    left.send(b"x" * (PACKET_BYTES + 1))
    channel = Channel(right)
    with pytest.raises(ProtocolError):
        channel.receive()
    channel.close()
    left.close()
