"""What works on this machine and what is off, each with its reason and what would change it."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from sparkchat import environment
from sparkchat.catalog import DEFAULT_MODEL, find_drafter, find_model, load_profile, profile_files
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.kernels import cpu
from sparkchat.paths import Paths


@dataclass(frozen=True)
class Feature:
    name: str
    reason_off: str | None
    """None: it is on."""

    @property
    def is_on(self) -> bool:
        return self.reason_off is None


def features(paths: Paths) -> list[Feature]:
    """Everything that depends on the machine; asks nothing of the network."""
    gpus = environment.gpus()
    no_gpu = _no_gpu(gpus)
    return [
        Feature("GPU", no_gpu),
        Feature("fused kernels", no_gpu or _without("triton")),
        Feature("CUDA graphs", no_gpu),
        Feature("several GPUs", no_gpu or _no_second(gpus)),
        Feature("peer access between GPUs", no_gpu or _no_second(gpus) or _no_peers()),
        Feature("compiled CPU kernels", cpu.why_not()),
        Feature("bfloat16 products on the CPU", _no_bf16()),
        Feature("full screen", _no_full_screen()),
        Feature("colour", _no_colour()),
        Feature("package index", _without("pip")),
        Feature(f"speculation of {DEFAULT_MODEL}", _no_speculation(paths)),
        Feature("profiles", _broken_profiles(paths)),
    ]


def _no_gpu(gpus: tuple[environment.Gpu, ...]) -> str | None:
    if not environment.torch_has_cuda():
        torch = environment.package_version("torch") or "none"
        return f"the installed torch ({torch}) has no CUDA; install a build that has it to use an NVIDIA GPU"
    if gpus:
        return None
    if not environment.has_gpu_tool():
        return "no NVIDIA driver is found (there is no nvidia-smi)"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}, which leaves no GPU to see"
    return "nvidia-smi shows no GPU; its own output may say why"


def _no_second(gpus: tuple[environment.Gpu, ...]) -> str | None:
    return None if len(gpus) > 1 else "there is one GPU"


def _no_peers() -> str | None:
    peers = environment.peer_access()
    if not peers:
        return "nvidia-smi does not say whether GPUs reach each other's memory"
    bad = sorted({f"GPU {a} and GPU {b}: {state}" for (a, b), state in peers.items() if a < b and state != "OK"})
    return None if not bad else f"not between {'; '.join(bad)} (as `nvidia-smi topo -p2p r` names it)"


def _no_bf16() -> str | None:
    if environment.has_bf16_product():
        return None
    where = "in models that the compiled kernels do not take, " if cpu.is_supported() else ""
    return (
        f"the processor has neither AVX-512 nor AVX-NE-CONVERT: {where}bfloat16 weights are held in float32, "
        "twice as large"
    )


def _no_full_screen() -> str | None:
    if environment.is_interactive():
        return None
    terminal = environment.terminal()
    if os.environ.get("TERM") == "dumb":
        return "TERM is dumb; the line REPL is used"
    names = [name for name in ("stdin", "stdout", "stderr") if not terminal[f"{name}_tty"]]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} no terminal"


def _no_colour() -> str | None:
    if "NO_COLOR" in os.environ:
        return "NO_COLOR is set"
    if not environment.terminal()["stdout_tty"]:
        return "stdout is no terminal"
    return "TERM is dumb" if os.environ.get("TERM") == "dumb" else None


def _without(package: str) -> str | None:
    if importlib.util.find_spec(package) is not None:
        return None
    ways = {"pip": "run it with `-m ensurepip`", "triton": "install triton; it comes with CUDA builds of torch"}
    return f"this Python has no {package}; {ways[package]}"


def _no_speculation(paths: Paths) -> str | None:
    try:
        return find_drafter(None, find_model(None, paths), paths).reason_off
    except SparkchatError as error:
        return error.message


def _broken_profiles(paths: Paths) -> str | None:
    """The first profile that cannot be used, and how many more there are."""
    broken = []
    try:
        names = list(profile_files(paths))
    except UsageError as error:
        return error.message
    for name in names:
        try:
            load_profile(name, paths)
        except UsageError as error:
            broken.append(error.message)
    if not broken:
        return None
    return broken[0] + (f" (and {len(broken) - 1} more)" if len(broken) > 1 else "")
