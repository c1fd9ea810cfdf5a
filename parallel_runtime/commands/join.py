"""python -m parallel_runtime join HOST:PORT: lend this machine's devices to the ComfyUI there, until Ctrl-C.

Starts this machine's workers when the other machine asks for them, ends them when its connection ends, and waits for
the next request."""

import argparse
import logging
import os
import sys
import time
from dataclasses import replace

import torch

from ..errors import ProtocolError, Refused
from ..group.machines import interface_of, parse_endpoint, versions
from ..group.torchrun import Rendezvous, Torchrun
from ..wire.channel import TcpChannel, read_key
from ..wire.messages import Denied, Ended, Invitation, Machine
from . import log_to

RETRY_SECONDS = 1.0
POLL_SECONDS = 0.05
LINE_CHARACTERS = 300  # what goes to the host must fit in a message

log = logging.getLogger(__name__)


def main(options: argparse.Namespace) -> int:
    log_to(sys.stdout)
    try:
        parse_endpoint(options.endpoint)
        key = read_key(options.token_file)
        comfyui = os.path.abspath(options.comfyui) if options.comfyui else ""
        last = ""
        while True:
            if (event := serve_one_group(options.endpoint, key, options.devices, comfyui)) != last:
                log.info("[CP] %s", event)
            last = event
            time.sleep(RETRY_SECONDS)
    except Refused as refused:
        sys.exit(str(refused))
    except KeyboardInterrupt:
        return 0


def serve_one_group(endpoint: str, key: str, devices: str = "", comfyui: str = "") -> str:
    """Lends the devices for the lifetime of one group. Returns what happened, in words."""
    try:
        channel = TcpChannel.call(endpoint, key)
    except ConnectionAbortedError:
        return f"{endpoint} hung up before it asked for the token, as where too many call; trying again"
    except EOFError:
        return f"{endpoint} does not accept the token of this machine"
    except OSError:
        return f"waiting for ComfyUI at {endpoint}"
    try:
        channel.send(Machine(versions(), devices, torch.cuda.device_count(), comfyui))
        message, _ = channel.receive()
        if isinstance(message, Denied):
            return f"ComfyUI's machine refuses this one: {message.reason}"
        assert isinstance(message, Invitation), message
        try:
            ended = _run_workers(endpoint, key, channel, message)
        except OSError as error:  # of this machine, such as a full disk
            ended = Ended(error=f"its workers cannot start: {error}"[:LINE_CHARACTERS])
        if ended is None:
            return "ComfyUI has ended the group"
        channel.send(ended)
        return f"this machine cannot help: {ended.error}" if ended.error else "the workers have ended"
    except (EOFError, OSError):
        return f"{endpoint} has no work; waiting"
    except ProtocolError:
        return f"{endpoint} runs another version of CP Sampler; install the same on both"
    finally:
        channel.close()


def _run_workers(endpoint: str, key: str, channel: TcpChannel, invitation: Invitation) -> Ended | None:
    """Runs the workers until they end, and returns how; None if ComfyUI ends them. Raises OSError."""
    log.info("[CP] joined: starting %d worker(s)", invitation.workers)
    host, _ = parse_endpoint(endpoint)
    store, interface = f"{host}:{invitation.store}", interface_of(channel.addresses[0])
    meeting = Rendezvous(store=store, machine=invitation.index, machines=invitation.nnodes, interface=interface)
    first_rank = invitation.index * invitation.workers
    torchrun = Torchrun(range(first_rank, first_rank + invitation.workers))
    try:
        torchrun.start(endpoint, invitation.token, meeting, key)
        while (ended := torchrun.ended()) is None and not channel.waiting():
            time.sleep(POLL_SECONDS)
        return ended and replace(ended, last_line=torchrun.last_line()[:LINE_CHARACTERS])
    finally:
        torchrun.close()
