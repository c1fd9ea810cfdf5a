"""What a launch sets for GPUs and networks: transfers first, one interface by its whole name, a user's word last."""

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from parallel_runtime.group.torchrun import OutputReader, Rendezvous, Torchrun, environment


@pytest.fixture
def clean(monkeypatch):
    for name in (
        "TORCH_NCCL_HIGH_PRIORITY",
        "NCCL_GRAPH_REGISTER",
        "NCCL_LAUNCH_ORDER_IMPLICIT",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "TORCHINDUCTOR_COMPILE_THREADS",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("clean")
def test_transfers_go_before_attention_and_over_loopback_alone():
    variables = environment(2, "token", "/folder", Rendezvous(store="/folder/store"))
    assert variables["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert (variables["NCCL_GRAPH_REGISTER"], variables["NCCL_LAUNCH_ORDER_IMPLICIT"]) == ("0", "1"), (
        "graphs neither hang"
    )
    assert variables["NCCL_SOCKET_IFNAME"] == "=lo"
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert variables["CP_TOKEN"] == "token"


@pytest.mark.usefixtures("clean")
def test_workers_share_the_cores_also_while_they_compile(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    variables = environment(4, "token", "/folder", Rendezvous(store="/folder/store"))
    assert (variables["OMP_NUM_THREADS"], variables["TORCHINDUCTOR_COMPILE_THREADS"]) == ("2", "2")


@pytest.mark.usefixtures("clean")
def test_what_a_user_sets_stays(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth3")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    variables = environment(2, "token", "/folder", Rendezvous(store="/folder/store"))
    assert (variables["TORCH_NCCL_HIGH_PRIORITY"], variables["NCCL_SOCKET_IFNAME"]) == ("0", "eth3")
    assert variables["NCCL_GRAPH_REGISTER"] == "1"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("comfyuis", "workers"),
    [
        ("backend:cudaMallocAsync", None),
        ("expandable_segments:True,backend:cudaMallocAsync", "expandable_segments:True"),
        ("backend: cudaMallocAsync, max_split_size_mb:128", " max_split_size_mb:128"),
        (
            "roundup_power2_divisions:[256:1,>:4],backend:cudaMallocAsync,max_split_size_mb:64",
            "roundup_power2_divisions:[256:1,>:4],max_split_size_mb:64",
        ),
        ("backend:native,expandable_segments:True", "backend:native,expandable_segments:True"),
    ],
)
def test_workers_have_an_allocator_of_their_own_and_the_rest_of_what_a_user_wrote(monkeypatch, name, comfyuis, workers):
    monkeypatch.setenv(name, comfyuis)
    assert environment(2, "token", "/folder", Rendezvous(store="/folder/store")).get(name) == workers
    assert os.environ[name] == comfyuis, "ComfyUI's own process keeps it"


def test_what_is_like_that_word_elsewhere_stays(monkeypatch):
    monkeypatch.setenv("SOME_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    variables = environment(2, "token", "/folder", Rendezvous(store="/folder/store"))
    assert variables["SOME_ALLOC_CONF"] == "backend:cudaMallocAsync"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in variables


def test_a_pipe_that_cannot_be_opened_leaves_no_descriptor(tmp_path):
    free = os.dup(0)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))  # room for one end of the pipe
    try:
        with pytest.raises(OSError, match="Too many open files"):
            OutputReader.from_fifo(str(tmp_path / "output"), print)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    now = os.dup(0)
    os.close(now)
    assert now == free


def test_threads_that_close_it_at_once_leave_nothing_behind():
    """A run that loses its workers closes them, and so does a ComfyUI that ends at that moment."""
    barrier = Barrier(8)

    def close(torchrun: Torchrun) -> None:
        barrier.wait()
        torchrun.close()

    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            torchrun = Torchrun(range(32))
            for closed in [threads.submit(close, torchrun) for _ in range(8)]:
                closed.result()
            assert not os.path.exists(torchrun.folder)
