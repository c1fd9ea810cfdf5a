"""Who may join a group, and what is said to who may not."""

from __future__ import annotations

import contextlib
import logging
import resource
import shutil
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from parallel_runtime.commands.join import serve_one_group
from parallel_runtime.engine.comm.ranks import RENDEZVOUS, register_rendezvous
from parallel_runtime.errors import Refused, WorkerStartError
from parallel_runtime.group import machines as machines_module
from parallel_runtime.group import worker_group as group_module
from parallel_runtime.group.machines import (
    MAX_UNPROVEN,
    Cluster,
    Gate,
    RemoteMachine,
    check_endpoint,
    interface_of,
    listen,
    parse_endpoint,
    version_mismatches,
    versions,
)
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import Placement
from parallel_runtime.wire import channel
from parallel_runtime.wire.channel import TOKEN, TOKEN_FILE, TcpChannel, read_key
from parallel_runtime.wire.messages import Cancel, Ended, Invitation, Machine

from ..groups import flux_job, spec_of
from ..zoo.checkpoints import write
from .guest import joining
from .network import FIRST, PORT, ROOT, SECOND, ULYSSES, on_two_machines

KEY, OTHER = "k" * 64, "o" * 64


@pytest.fixture
def gate():
    opened = Gate("127.0.0.1", 0, KEY)
    yield opened
    opened.close()


def address_of(gate):
    return f"127.0.0.1:{gate._server.getsockname()[1]}"


def test_who_has_the_token_comes_in_and_messages_go_both_ways(gate):
    guest = TcpChannel.call(address_of(gate), KEY)
    host = gate.arrivals.get(timeout=5)
    guest.send(Machine(("1",), "", 0, ""))
    assert host.greeting(Machine, 5) == Machine(("1",), "", 0, "")
    host.send(Cancel(7))
    assert guest.receive() == (Cancel(7), None)
    host.close()
    with pytest.raises(EOFError):
        guest.receive()
    guest.close()


def test_who_has_another_token_is_refused_and_named_in_the_log(gate, caplog):
    with caplog.at_level(logging.WARNING), pytest.raises(EOFError):
        TcpChannel.call(address_of(gate), OTHER)
    assert gate.arrivals.empty()
    assert "127.0.0.1 was refused: its token differs from this machine's" in caplog.text


@pytest.mark.parametrize("knock", [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 1000])
def test_a_stranger_learns_nothing_but_a_random_number(gate, knock):
    answers = []
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", int(address_of(gate).split(":")[1]))) as stranger:
            stranger.sendall(knock)
            with contextlib.suppress(OSError):  # shown the door by now
                stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            answers.append(b"".join(iter(lambda: _receive(stranger), b"")))
    assert len(answers[0]) <= 32
    assert not answers[0] or answers[0] != answers[1]
    assert gate.arrivals.empty()


def test_strangers_who_fill_every_place_do_not_keep_out_who_has_the_token(gate):
    place = ("127.0.0.1", int(address_of(gate).split(":")[1]))
    with contextlib.ExitStack() as strangers:
        for _ in range(MAX_UNPROVEN):
            stranger = strangers.enter_context(socket.create_connection(place, timeout=5))
            assert len(stranger.recv(32)) == 32, "it is asked for the token"
        guest = TcpChannel.call(address_of(gate), KEY)
        gate.arrivals.get(timeout=5).close()
        guest.close()


def test_a_stranger_who_sends_a_byte_now_and_then_has_no_longer_than_anybody(gate, monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", int(address_of(gate).split(":")[1]))) as stranger:
        assert len(stranger.recv(32)) == 32
        stranger.settimeout(0.05)
        for _ in range(32):
            with contextlib.suppress(TimeoutError):
                assert not _receive(stranger)
                return
            stranger.send(b"x")
    pytest.fail("it was listened to for as long as it spoke")


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_another_token_and_no_answer_at_all_are_told_apart(gate, key):
    reason = serve_one_group(address_of(gate), OTHER)
    assert reason.endswith("does not accept the token of this machine")
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].close()).start()
        reason = serve_one_group(f"127.0.0.1:{other.getsockname()[1]}", key)
    assert "hung up before it asked for the token" in reason


def test_without_a_free_descriptor_the_gate_waits_and_says_so(gate, caplog):
    caller = socket.socket()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (caller.fileno(), before[1]))
    try:
        caller.connect(("127.0.0.1", int(address_of(gate).split(":")[1])))
        clock = time.pthread_getcpuclockid(gate._thread.ident)
        used = time.clock_gettime(clock)
        time.sleep(0.5)
        assert time.clock_gettime(clock) - used < 0.1, "it tries again and again"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    caller.settimeout(5)
    assert len(caller.recv(32)) == 32
    assert caplog.text.count("it cannot be accepted (Too many open files)") == 1
    caller.close()


def test_what_fails_beside_the_gate_leaves_no_gate(monkeypatch):
    """Such as a second port that is not to be had."""

    def only_the_named(address, port):
        if not port:
            raise Refused("no port is left")
        return listen(address, port)

    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv(TOKEN, "a token of some length")
    monkeypatch.setattr(machines_module, "listen", only_the_named)
    with pytest.raises(Refused, match="no port is left"):
        Cluster(Placement(devices=("cpu",), nnodes=2, rdzv_endpoint=endpoint), "token")
    Gate(*parse_endpoint(endpoint), KEY).close()


@pytest.mark.parametrize("kind", [Machine, Ended])
def test_who_stops_in_the_middle_of_a_message_counts_as_gone(gate, monkeypatch, kind):
    guest = TcpChannel.call(address_of(gate), KEY)
    host = gate.arrivals.get(timeout=5)
    monkeypatch.setattr(channel, "SILENCE_SECONDS", 0.3)
    guest._socket.send(bytes(3))
    answers: list[object] = []
    ask = (lambda: host.greeting(Machine, 5)) if kind is Machine else RemoteMachine(host, (), "").ended
    asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    asking.start()
    asking.join(5)
    assert answers in ([None], [Ended()])
    host.close()
    guest.close()


def _receive(sock):
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


def test_an_offer_that_finds_no_room_is_dropped_and_not_waited_for(gate):
    guest = TcpChannel.call(address_of(gate), KEY)
    host = gate.arrivals.get(timeout=5)
    started = time.monotonic()
    while guest.offer(Machine(("x" * 1000,), "", 0, "")):
        assert time.monotonic() - started < 10, "nobody reads, and there is always room"
    host.close()
    guest.close()


def test_nothing_that_a_stranger_writes_where_machines_meet_is_unpickled(monkeypatch):
    """Who is which machine they have been told, and torchrun asks the store for no more than JSON."""

    def unpickled(*_):
        raise AssertionError("a stranger's pickle was read")

    monkeypatch.setattr("pickle.loads", unpickled)
    monkeypatch.setattr("pickle.load", unpickled)
    register_rendezvous()
    store = TCPStore("127.0.0.1", 0, is_master=True)
    for prefix in ("", "machines/"):  # under the keys of torchrun's own rendezvous, too
        PrefixStore(prefix, store).set("torch.rendezvous.none", "a pickle of a stranger")
    for machine in (1, 0):
        parameters = RendezvousParameters(RENDEZVOUS, f"127.0.0.1:{store.port}", "none", 2, 2, machine=str(machine))
        met = rendezvous_handler_registry.create_handler(parameters).next_rendezvous()
        assert (met.rank, met.world_size) == (machine, 2)
        met.store.set(f"seen by {machine}", "")
    assert met.store.check(["seen by 0", "seen by 1"])


@pytest.mark.parametrize("token", [None, "", "short"])
def test_without_a_token_there_are_no_several_machines(monkeypatch, tmp_path, token):
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    if token is not None:
        (tmp_path / "token").write_text(token)
        monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    with pytest.raises(Refused, match="shared token of at least 16 characters, found"):
        WorkerGroup(on_two_machines())


def test_a_token_is_the_same_from_a_file_and_from_the_environment(monkeypatch, tmp_path):
    (tmp_path / "token").write_text("sixteen characters\n")
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    monkeypatch.setenv(TOKEN, "sixteen characters")
    assert read_key(str(tmp_path / "token")) == read_key()
    with pytest.raises(Refused, match="cannot be read: No such file"):
        read_key(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("endpoint", "sentence"),
    [
        ("", "several machines need rdzv_endpoint"),
        ("10.0.0.1", "write it as 10.0.0.1:29500"),
        ("10.0.0.1:port", "write it as 10.0.0.1:29500"),
        ("0.0.0.0:29500", "name one address"),
        ("no..host:29500", "is neither an IPv4 address nor the name of one"),
    ],
)
def test_an_endpoint_that_is_none_is_refused(endpoint, sentence):
    with pytest.raises(Refused, match=sentence):
        parse_endpoint(endpoint)


def test_an_address_of_another_machine_or_a_taken_port_is_refused(net):
    with pytest.raises(Refused, match=f"no address {SECOND}"):
        Gate(SECOND, PORT, KEY)
    with socket.socket() as taken:
        taken.bind((FIRST, PORT))
        taken.listen()
        with pytest.raises(Refused, match=f"{FIRST}:{PORT} cannot be used .Address already in use"):
            WorkerGroup(on_two_machines())


def test_machines_that_do_not_come_are_missed_in_a_sentence(net, monkeypatch):
    monkeypatch.setattr(group_module, "START_SECONDS", 0.5)
    with pytest.raises(WorkerStartError, match=f"only 1 of 2 machines are there.*join {FIRST}:{PORT}"):
        WorkerGroup(on_two_machines())


@pytest.mark.sweep
def test_a_machine_with_another_token_does_not_join(net, folder, monkeypatch, caplog):
    monkeypatch.setattr(group_module, "START_SECONDS", 15)
    with joining(folder, namespace=net.second, token="some other token, long enough") as guest:
        with pytest.raises(WorkerStartError, match="only 1 of 2 machines"):
            WorkerGroup(on_two_machines())
        assert f"{SECOND} was refused: its token differs" in caplog.text
        guest.wait_until_it_says("does not accept the token")


def test_a_second_address_of_an_interface_is_one_of_this_machine(net):
    subprocess.run(["ip", "address", "add", "10.77.0.9/24", "dev", "cable"], check=True)
    check_endpoint(f"10.77.0.9:{PORT}")
    assert interface_of("10.77.0.9") == interface_of(FIRST) == "cable"
    Gate("10.77.0.9", PORT, KEY).close()
    with pytest.raises(Refused, match=f"no network interface of this machine has {SECOND}. It has: .*10.77.0.9"):
        check_endpoint(f"{SECOND}:{PORT}")


def test_a_machine_that_has_no_room_for_its_workers_says_so_on_both_sides(gate, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    hosts = []

    def host():
        hosts.append(gate.arrivals.get(timeout=5))
        assert hosts[0].greeting(Machine, 5)
        hosts[0].send(Invitation(index=1, nnodes=2, workers=1, store=1, token="t"))

    hosting = threading.Thread(target=host)
    hosting.start()
    said = serve_one_group(address_of(gate), KEY)
    hosting.join()
    assert "its workers cannot start: [Errno 2] No such file or directory: '/nowhere" in said
    assert "No such file or directory" in hosts[0].receive()[0].error
    hosts[0].close()


def test_an_endpoint_that_no_other_machine_can_reach_is_warned_about(monkeypatch, caplog):
    monkeypatch.setenv(TOKEN, KEY)
    monkeypatch.setattr(group_module, "START_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(WorkerStartError, match="only 1 of 2 machines are there"):
        WorkerGroup(Placement(devices=("cpu",), nnodes=2, rdzv_endpoint=endpoint))
    assert "no other machine can reach 127.0.0.1, which is this machine's loopback" in caplog.text


def test_a_machine_that_leaves_before_it_is_asked_for_workers_is_named(monkeypatch):
    monkeypatch.setenv(TOKEN, KEY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    admit, guests = Cluster._admit, []

    def call():
        while not guests:
            with contextlib.suppress(ConnectionRefusedError):
                guests.append(TcpChannel.call(endpoint, read_key()))
        guests[0].send(Machine(versions(), "", 0, ""))

    def leave(self, channel):
        admit(self, channel)
        guests[0]._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        guests[0]._socket.close()  # by a reset, as of a machine that restarts: the next message to it cannot be sent
        assert channel.hung_up(5)

    monkeypatch.setattr(Cluster, "_admit", leave)
    monkeypatch.setattr(group_module, "START_SECONDS", 15)
    threading.Thread(target=call).start()
    with pytest.raises(WorkerStartError, match=r"^the workers ended before they were up \(on 127.0.0.1\)$"):
        WorkerGroup(Placement(devices=("cpu",), nnodes=2, rdzv_endpoint=endpoint))


def test_another_version_there_is_an_error_that_names_both(net, folder, tmp_path):
    for folder_of_pack in ("parallel_runtime", "locales"):
        shutil.copytree(ROOT / folder_of_pack, tmp_path / "pack" / folder_of_pack)
    with (tmp_path / "pack" / "parallel_runtime" / "worker" / "serve.py").open("a") as file:
        file.write("# newer\n")
    with joining(folder, namespace=net.second, package=tmp_path / "pack") as guest:
        with pytest.raises(
            WorkerStartError, match=rf"{SECOND} cannot join: it has CP Sampler (\w+), this machine CP Sa"
        ):
            WorkerGroup(on_two_machines())
        guest.wait_until_it_says("refuses this one: it has CP Sampler")


def test_builds_of_pytorch_are_compared():
    """pip calls one and the same build 2.13.0 here and 2.13.0+cpu there; PyTorch itself does not."""
    assert f"PyTorch {torch.__version__}" in versions()
    theirs = tuple("PyTorch 1.0.0" if version.startswith("PyTorch") else version for version in versions())
    assert version_mismatches(theirs) == [("PyTorch 1.0.0", f"PyTorch {torch.__version__}")]


def test_another_number_of_devices_there_is_an_error_that_names_both(net, folder):
    with (
        joining(folder, "--devices", "cpu,cpu", namespace=net.second),
        pytest.raises(
            WorkerStartError, match=rf"{SECOND} cannot join: it offers cpu, cpu, and the machine of ComfyUI has cpu;"
        ),
    ):
        WorkerGroup(on_two_machines())


@pytest.mark.sweep
def test_another_model_under_the_same_path_there_is_refused(net, folder, tmp_path):
    """With a mount of its own the other machine sees other weights in a file of the same name and size."""
    ours = write(tmp_path / "ours", "flux_schnell")
    theirs = write(tmp_path / "theirs", "flux_schnell", seed=99)
    assert ours.stat().st_size == theirs.stat().st_size
    see_theirs = ("unshare", "--mount", "sh", "-c", f'mount --bind {theirs} {ours} && exec "$@"', "sh")
    with joining(folder, namespace=net.second, wrapper=see_theirs), WorkerGroup(on_two_machines()) as group:
        for _ in range(2):
            with pytest.raises(Refused, match=rf"^{ours} is another file .* \(on {SECOND}\)$"):
                group.run(spec_of(ours), ULYSSES, flux_job())
        assert group.alive


@pytest.mark.sweep
def test_a_model_that_is_missing_there_is_named(net, folder, tmp_path):
    ours = write(tmp_path / "ours", "flux_schnell")
    hide = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {ours.parent} && exec "$@"', "sh")
    with joining(folder, namespace=net.second, wrapper=hide), WorkerGroup(on_two_machines()) as group:
        with pytest.raises(Refused, match=rf"^there is no file {ours} on this machine.* \(on {SECOND}\)$"):
            group.run(spec_of(ours), ULYSSES, flux_job())
        assert group.alive


@pytest.mark.sweep
def test_the_token_is_in_no_command_line(net, folder):
    with joining(folder, namespace=net.second) as guest, WorkerGroup(on_two_machines()):
        for process in guest.started():
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
            assert read_key() not in command
