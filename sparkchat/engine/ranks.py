"""The other ranks of a model that is spread over several devices of this machine: one process each, started here.

Rank 0 is the engine. It alone plans, draws and accepts; it tells the others which call of the model to make, on a pipe
to each, and they make it with their parts of the weights (rank_process.py). What a call works on travels by
``torch.distributed``: gloo on the CPU, NCCL on GPUs. Why so: docs/decisions/0007-ranks-repeat-calls.md.

A rank that ends takes the engine with it: a collective whose partner is gone cannot be left by other means.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

import sparkchat
from sparkchat.errors import EngineCrash, NotEnoughMemory, SparkchatError, UsageError, error_from_name
from sparkchat.models.parallel import ProcessGroup
from sparkchat.models.symmetric import open_group
from sparkchat.strict_json import dumps, loads

_PROGRAM = "from sparkchat.engine.rank_process import main; main()"
_START_SECONDS = 300.0
"""For Python, torch and a GPU's context."""
_JOIN_SECONDS = 180.0
_COLLECTIVE_SECONDS = 300.0
"""Ranks may be apart by as long as one of them compiles a kernel."""
_CLOSE_SECONDS = 5.0
_LOST_SECONDS = 5.0
"""A failed collective is known before the end of its process is; how long to wait for the better reason."""
_LOOPBACK = "lo"
_LOG_BYTES = 4000


@dataclass(frozen=True)
class Member:
    """One of the other ranks."""

    rank: int
    process: subprocess.Popen[bytes]
    commands: int
    """Descriptor that its commands are written to."""
    log: IO[bytes]


class Team:
    """Rank 0's end of the group."""

    def __init__(self, size: int, device: torch.device) -> None:
        """``device``: rank 0's; the others take the GPUs behind it.

        Raises UsageError where there are too few, EngineCrash where they do not start or do not reach each other.
        """
        devices = rank_devices(size, device)
        self.size, self.device = size, devices[0]
        set_loopback()
        meeting = open_meeting()
        self._reports: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        # Whether the engine's thread waits for reports, and raises what goes wrong; else it may be in a collective.
        self._is_listening, self._is_closing = True, False
        self._loss: SparkchatError | None = None
        self._lost = threading.Event()
        self._members: list[Member] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for rank in range(1, size):
                self._members.append(self._start(rank, meeting))
            for member in self._members:
                place = {"rank": member.rank, "size": size, "device": str(devices[member.rank])}
                self._write(member, {"op": "join", "meeting": meeting, **place})
            use_device(self.device)
            self._wait_for("started", _START_SECONDS)
            self.group = self._join(meeting)
            stack.pop_all()

    def load(
        self, paths: Sequence[str | None], dtype: torch.dtype | None, threads: int, *, is_dummy: bool = False
    ) -> None:
        """Have the other ranks load their parts of target and drafter; ``wait_until_loaded`` waits for them."""
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        self._is_listening = True
        self.call("load", paths=list(paths), dtype=name, threads=threads, dummy=is_dummy)

    def wait_until_loaded(self) -> None:
        """Raises what a rank met while loading."""
        self._wait_for("loaded", None)

    def call(self, op: str, *tensors: Tensor, **plain: Any) -> None:
        """Have every other rank do this; rank 0 then does the same itself. ``tensors`` are those of rank 0."""
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        for member in self._members:
            self._write(member, {"op": op, "tensors": shapes, **plain})
        with self.partners():
            self.group.send(tensors)

    @contextmanager
    def partners(self) -> Iterator[None]:
        """Around what needs the other ranks: when one has gone, its end is what is told, not what came of it."""
        try:
            yield
        except RuntimeError:
            self._lost.wait(_LOST_SECONDS)
            if self._loss is not None:
                raise self._loss from None
            raise

    def close(self) -> None:
        """End the other ranks and leave the group."""
        self._is_closing = True
        for member in self._members:
            with suppress(SparkchatError):
                self._write(member, {"op": "leave"})
        if dist.is_initialized():
            # Leaving is something that ranks do together, and one that has gone would be waited for.
            leaving = threading.Thread(target=dist.destroy_process_group, name="leave", daemon=True)
            leaving.start()
            leaving.join(_CLOSE_SECONDS)
        for member in self._members:
            os.close(member.commands)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for member in self._members:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            member.log.close()
        self._members = []

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1 and up."""
        return [member.process.pid for member in self._members]

    def _start(self, rank: int, meeting: int) -> Member:
        command_read, command_write = os.pipe()
        event_read, event_write = os.pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  (close() closes it)
        try:
            process = subprocess.Popen(
                # -P keeps the current folder off the module path, as for the engine itself.
                [sys.executable, "-P", "-c", _PROGRAM, str(command_read), str(event_write)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(command_read, event_write, meeting),
                env=_environment(),
            )
        except OSError as error:
            for fd in (command_write, event_read):
                os.close(fd)
            raise EngineCrash(f"the process of rank {rank} cannot be started: {error}") from None
        finally:
            os.close(command_read)
            os.close(event_write)
        member = Member(rank, process, command_write, log)
        threading.Thread(target=self._watch, args=(member, event_read), name=f"rank {rank}", daemon=True).start()
        return member

    def _join(self, meeting: int) -> ProcessGroup:
        """Meet the other ranks, which all stand before the same call."""
        who = f"{self.size} ranks from {self.device} on"
        late = EngineCrash(f"{who} do not reach each other within {_JOIN_SECONDS:.0f} s; NCCL_DEBUG=INFO says more")
        timer = threading.Timer(_JOIN_SECONDS, end_process, (late,))
        timer.daemon = True
        timer.start()
        try:
            return join_group(meeting, 0, self.size, self.device)
        except RuntimeError as error:
            raise EngineCrash(f"{who} do not reach each other: {one_line(error)}") from error
        finally:
            timer.cancel()

    def _wait_for(self, event: str, seconds: float | None) -> None:
        """Until every rank has said so. Raises what one reports instead, or how it ended."""
        waiting = set(range(1, self.size))
        while waiting:
            try:
                rank, report = self._reports.get(timeout=seconds)
            except queue.Empty:
                raise EngineCrash(f"rank {min(waiting)} of {self.size} has not {event} after {seconds} s") from None
            if report is None or report["event"] != event:
                raise self._reason(rank, report)
            waiting.discard(rank)
        self._is_listening = False
        # One that ended before this was noted is ours to tell.
        if not self._reports.empty():
            raise self._reason(*self._reports.get())

    def _watch(self, member: Member, events: int) -> None:
        """Runs in a thread of its own: pass on what the rank reports, and end the engine when the rank ends."""
        report: dict[str, Any] | None = None
        with os.fdopen(events, "rb") as pipe:
            for line in pipe:
                report = loads(line)
                if report["event"] == "error":
                    break
                self._reports.put((member.rank, report))
                report = None
            if self._is_closing:
                return
            self._reports.put((member.rank, report))
            if not self._is_listening:
                self._lose(member, self._reason(member.rank, report))

    def _lose(self, member: Member, reason: SparkchatError) -> None:
        """The engine's thread may be in a collective that never returns."""
        sys.stderr.write(_tail(member.log))
        end_process(reason)
        self._loss = reason
        self._lost.set()

    def _reason(self, rank: int, report: dict[str, Any] | None) -> SparkchatError:
        who = f"rank {rank} of {self.size}"
        if report is not None:
            return error_from_name(report["error"], f"{who}: {report['message']}")
        member = self._members[rank - 1]
        return EngineCrash(f"{who} {_describe_end(member.process.wait(), _tail(member.log))}")

    def _write(self, member: Member, command: dict[str, Any]) -> None:
        data = memoryview(dumps(command).encode() + b"\n")
        try:
            while data:
                data = data[os.write(member.commands, data) :]
        except BrokenPipeError:
            if not self._is_closing and not self._is_listening:
                self._lost.wait(_LOST_SECONDS)
            raise self._loss or self._reason(member.rank, None) from None


def end_process(reason: SparkchatError) -> None:
    """End this process with one last line: what its client tells the user. A collective can be left no other way."""
    sys.stderr.write(f"{reason.message}\n")
    sys.stderr.flush()
    os._exit(EngineCrash.exit_code)


def rank_devices(size: int, first: torch.device) -> list[torch.device]:
    """The device of every rank: the CPU for all, or GPUs side by side. Raises UsageError where there are too few."""
    if first.type == "cpu":
        return [first] * size
    start, count = first.index or 0, torch.cuda.device_count()
    if start + size > count:
        raise UsageError(f"--tp {size} was asked for, but there are {count - start} GPUs from {first} on; give fewer")
    if not dist.is_nccl_available():
        raise UsageError(f"--tp {size} was asked for, but this torch has no NCCL; install one that has it")
    return [torch.device("cuda", start + rank) for rank in range(size)]


def open_meeting() -> int:
    """A descriptor of a file without a name, in which ranks find each other: it is gone with the last of them.

    It stays open: torch writes to it through its number when the group is left, and that may be late.
    """
    if not hasattr(os, "memfd_create"):
        raise UsageError("--tp needs Linux; leave it out")
    return os.memfd_create("sparkchat-ranks")


def use_device(device: torch.device) -> None:
    """Make ``device`` this process's own, and find out whether it can be used at all."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)


def join_group(meeting: int, rank: int, size: int, device: torch.device) -> ProcessGroup:
    """Meet the other ranks, through the open file ``meeting``; ``device`` is the one in use."""
    store = dist.FileStore(f"/proc/self/fd/{meeting}", size)
    settings: dict[str, Any] = {"store": store, "rank": rank, "world_size": size}
    settings["timeout"] = timedelta(seconds=_COLLECTIVE_SECONDS)
    if device.type == "cpu":
        dist.init_process_group("gloo", **settings)
    else:
        dist.init_process_group("nccl", device_id=device, **settings)
    return open_group(device)


def set_loopback() -> None:
    """For this process and its children: ranks are of one machine, and nothing of theirs may listen outward."""
    if Path("/sys/class/net", _LOOPBACK).exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    # Multicast needs rights that containers often lack, and gains nothing for messages as small as these.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def out_of_memory(error: Exception, what: str) -> NotEnoughMemory | None:
    """The error to report where memory has run out; None for others. torch says so in the text alone."""
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return NotEnoughMemory(f"{what} ran out of memory ({text[:160]}); try a smaller --context")
    return None


def one_line(error: Exception) -> str:
    """What an error of a library says, with its kind."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def _environment() -> dict[str, str]:
    root = str(Path(sparkchat.__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _tail(log: IO[bytes]) -> str:
    """The end of what a rank wrote. Its place in the file is the rank's own, so it is not moved."""
    fd = log.fileno()
    size = os.fstat(fd).st_size
    return os.pread(fd, _LOG_BYTES, max(0, size - _LOG_BYTES)).decode("utf-8", "replace")


def _describe_end(code: int, log: str) -> str:
    if code < 0:
        what = f"was ended by {signal.Signals(-code).name}"
    else:
        what = f"ended with code {code}"
    lines = [line for line in log.splitlines() if line.strip()]
    return f"{what}; its last words: {lines[-1].strip()[:300]}" if lines else what
