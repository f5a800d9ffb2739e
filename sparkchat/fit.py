"""Whether a model fits this machine, with numbers, before anything of it is fetched or loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparkchat import environment, inventory
from sparkchat.architectures import refuse_unsupported
from sparkchat.catalog import DrafterRef, ModelRef
from sparkchat.errors import NotEnoughMemory
from sparkchat.headers import UnreadableHeader
from sparkchat.kernels import cpu
from sparkchat.memory_plan import SMALLEST_CONTEXT, MemoryPlan, Setting, device_counts, plan_memory
from sparkchat.paths import Paths
from sparkchat.profile import Profile
from sparkchat.resolve import Resolution
from sparkchat.store import human


@dataclass(frozen=True)
class Machine:
    """Memory of the devices that a model may be put on."""

    devices: tuple[int, ...]
    """Bytes of each GPU, or of the main memory alone; empty when it cannot be told."""
    has_gpus: bool
    free: tuple[int, ...] = ()
    """Of these, what nobody has taken; empty when it cannot be told."""

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
        gpus = gpus[int(device.partition(":")[2] or 0) :]
        sizes, free = (tuple(getattr(gpu, name) for gpu in gpus) for name in ("memory_bytes", "free_bytes"))
        return Machine(sizes, has_gpus=True, free=free)
    memory = environment.memory()
    total, available = memory.total_bytes, memory.available_bytes
    return Machine(() if total is None else (total,), False, () if available is None else (available,))


def needs_of(profile: Profile | None) -> dict[int, float]:
    """Number of devices -> gigabytes on each; empty when the profile says nothing."""
    return {} if profile is None else profile.get("model.min_memory_gb", {})


def describe_needs(needs: dict[int, float]) -> str:
    return ", ".join(f"{count} x {gb:g} GB" for count, gb in sorted(needs.items()))


def refuse_too_large(options: Resolution, model: ModelRef) -> None:
    """Raise NotEnoughMemory where the machine has less memory than the model needs at the least."""
    needs, machine = needs_of(model.profile), this_machine(options["device"])
    if machine.fits(needs, options["tp"]) is False:
        enough = next((count for count in sorted(needs) if machine.fits(needs, count)), None)
        advice = "choose a smaller model, see `sparkchat list`" if enough is None else f"give --tp {enough}"
        raise NotEnoughMemory(
            f"{model.name} needs {describe_needs(needs)} (by number of devices), "
            f"and this machine has {machine.describe()}; {advice}"
        )


def setting_of(options: Resolution, machine: Machine, num_requests: int, num_devices: int | None = None) -> Setting:
    """How these options would run on this machine."""
    return Setting(
        device="cuda" if machine.has_gpus else "cpu",
        dtype=options["dtype"],
        num_devices=options["tp"] if num_devices is None else num_devices,
        num_requests=num_requests,
        has_graphs=machine.has_gpus and options["graphs"] is not False,
        has_bf16_product=environment.has_bf16_product(),
        has_cpu_kernels=cpu.is_supported(),
    )


def plans_by_devices(
    model: ModelRef, drafter: DrafterRef, paths: Paths, setting: Setting, *, ask_hub: bool = False
) -> dict[int, MemoryPlan]:
    """The memory plans of a pair from the headers of its files, for the number of devices in ``setting`` and for every
    number that could share the model; empty where they are not there or not understood.

    ``ask_hub``: headers of what is not on disk are asked of the hub, and what that raises is raised here. UsageError
    for a model that cannot be run, whatever memory there is.
    """
    try:
        target = inventory.headers(model.path, model.sources, paths, ask_hub=ask_hub)
        if target is None:
            return {}
        refuse_unsupported(target, model.name)
        draft = None
        if drafter.is_present and not drafter.is_inner:
            draft = inventory.headers(drafter.path, drafter.sources, paths, ask_hub=ask_hub)
            if draft is None:
                return {}
        counts = sorted({setting.num_devices, *device_counts(target)})
        return {
            count: plan_memory(target, draft, replace(setting, num_devices=count), inner_drafter=drafter.is_inner)
            for count in counts
        }
    except UnreadableHeader:
        return {}


def fewest_devices(plans: Mapping[int, MemoryPlan], machine: Machine, context: int | None) -> int | None:
    """The smallest number of devices of which each has its part of ``context`` tokens free, or of a short chat."""
    for count, plan in sorted(plans.items()):
        free = free_on(machine, count)
        least = min(SMALLEST_CONTEXT if context is None else context, plan.max_context)
        if free is not None and plan.least(least) <= free:
            return count
    return None


def free_on(machine: Machine, num_devices: int) -> int | None:
    """Free bytes of the fullest device that would be used; None when unknown, or when there are not so many."""
    return min(machine.free[:num_devices]) if 0 < num_devices <= len(machine.free) else None


def fitting_context(
    plan: MemoryPlan, machine: Machine, asked: int | None, name: str, enough_devices: int | None = None
) -> int | None:
    """The context to run with: None leaves it to the model; a smaller number when the model's own does not fit.

    ``asked``: a context that was typed, which is honoured or refused; ``enough_devices``: how many would hold it.
    Raises NotEnoughMemory with the numbers.
    """
    free = free_on(machine, plan.num_devices)
    wanted = min(plan.max_context if asked is None else asked, plan.max_context)
    if free is None or plan.least(wanted) <= free:
        return None
    largest = plan.largest_context(free)
    if asked is None and largest >= min(SMALLEST_CONTEXT, plan.max_context):
        return largest
    shown = wanted if asked is not None else min(SMALLEST_CONTEXT, plan.max_context)
    ways = [f"--tp {enough_devices}"] if enough_devices is not None else []
    ways += [f"--context {largest}"] if asked is not None and largest >= SMALLEST_CONTEXT else []
    if plan.drafter and plan.least(shown) - plan.drafter <= free:
        ways.append("--drafter none")
    raise NotEnoughMemory(
        f"{name} needs {human(plan.least(shown))} ({describe_parts(plan, shown, shown)}), and {human(free)} is free; "
        f"give {' or '.join([*ways, 'a smaller model'])}, or free some memory"
    )


def shown_tokens(plan: MemoryPlan, context: int, limit: int | None, free: int | None) -> int | None:
    """Tokens of a shared cache as it would be made at this context: ``limit`` is the user's own. None without one."""
    if not plan.is_shared:
        return None
    tokens = plan.cache_tokens(context, free)
    return tokens if limit is None else max(context, min(tokens, limit))


def describe_parts(plan: MemoryPlan, context: int, tokens: int | None = None) -> str:
    """e.g. ``weights 16.4 GB, drafter 2.3 GB, cache of 8,192 tokens 2.4 GB, graphs 0.1 GB, working space 1.4 GB``"""
    named = context if tokens is None or not plan.is_shared else tokens
    names = {"cache": f"cache of {named:,} tokens", "working": "working space"}
    parts = plan.parts(context, tokens).items()
    return ", ".join(f"{names.get(part, part)} {human(size)}" for part, size in parts if size)


def describe_plan(plan: MemoryPlan, machine: Machine, context: int | None, limit: int | None = None) -> list[str]:
    """Lines for people: what is needed at a context, and the largest one that fits. ``limit``: --cache-tokens."""
    context = plan.max_context if context is None else min(context, plan.max_context)
    each = f" on each of {plan.num_devices} devices" if plan.num_devices > 1 else ""
    free = free_on(machine, plan.num_devices)
    tokens = shown_tokens(plan, context, limit, free)
    lines = [f"{human(plan.total(context, tokens))}{each}: {describe_parts(plan, context, tokens)}"]
    if free is None:
        return [*lines, f"not known whether it fits: {machine.describe()}"]
    largest = plan.largest_context(free)
    if largest < min(SMALLEST_CONTEXT, plan.max_context):
        return [*lines, f"DOES NOT FIT: {human(free)} is free"]
    return [
        *lines,
        f"the largest context that fits in {human(free)} free is {largest:,} of {plan.max_context:,} tokens",
    ]


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}".removesuffix(".0")
