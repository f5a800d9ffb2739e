"""Whether a model fits this machine, with numbers, before anything of it is fetched."""

from __future__ import annotations

from dataclasses import dataclass

from sparkchat import environment
from sparkchat.catalog import ModelRef
from sparkchat.errors import NotEnoughMemory
from sparkchat.profile import Profile
from sparkchat.resolve import Resolution


@dataclass(frozen=True)
class Machine:
    """Memory of the devices that a model may be put on."""

    devices: tuple[int, ...]
    """Bytes of each GPU, or of the main memory alone; empty when it cannot be told."""
    has_gpus: bool

    def describe(self) -> str:
        if not self.devices:
            return "memory unknown"
        sizes = " and ".join(f"{_gb(size)} GB" for size in sorted(set(self.devices)))
        if not self.has_gpus:
            return f"no GPU that can be used, {sizes} of memory"
        count = len(self.devices)
        return f"{count} GPU{'s' * (count > 1)} of {sizes}"

    def fits(self, needs: dict[int, float], count: int) -> bool | None:
        """Whether ``count`` of its devices hold their parts; None when that is not known."""
        if count not in needs or not self.devices:
            return None
        return count <= len(self.devices) and needs[count] * 1e9 <= min(self.devices[:count])


def this_machine(device: str) -> Machine:
    """``device`` as the option is given: auto, cpu, cuda or cuda:N."""
    gpus = () if device == "cpu" or not environment.torch_has_cuda() else environment.gpus()
    if gpus:
        first = int(device.partition(":")[2] or 0)
        return Machine(tuple(gpu.memory_bytes for gpu in gpus[first:]), has_gpus=True)
    total = environment.memory().total_bytes
    return Machine(() if total is None else (total,), has_gpus=False)


def needs_of(profile: Profile | None) -> dict[int, float]:
    """Number of devices -> gigabytes on each; empty when the profile says nothing."""
    return {} if profile is None else profile.get("model.min_memory_gb", {})


def describe_needs(needs: dict[int, float]) -> str:
    return ", ".join(f"{count} x {gb:g} GB" for count, gb in sorted(needs.items()))


def refuse_too_large(options: Resolution, model: ModelRef) -> None:
    """Raise NotEnoughMemory where the machine has less memory than the model needs at the least."""
    needs, machine = needs_of(model.profile), this_machine(options["device"])
    if machine.fits(needs, options["tp"]) is False:
        raise NotEnoughMemory(
            f"{model.name} needs {describe_needs(needs)} (by number of devices), "
            f"and this machine has {machine.describe()}; choose a smaller model, see `sparkchat list`"
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}".removesuffix(".0")
