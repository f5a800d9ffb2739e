"""What a captured step costs the host, and what it leaves to Python's collector, by requests: on a CPU, F-tiny.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/host_step.py --requests 8,32,256 --modes off,static,compact

Times are of this thread alone and outside of the stages, which a GPU would run meanwhile; ``send`` is the JSON text of
the events. Objects are those that the collector would have to look at: held with a step's events, and left when these
are gone. What a look takes is told of what was left, and of some 10,000 objects of events that somebody keeps.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from cases.harness import random_prompts, to_request, varied_cost  # noqa: E402
from fixtures.tiny import write_tiny  # noqa: E402
from sparkchat.engine.engine import Engine  # noqa: E402
from sparkchat.params import LoadSpec  # noqa: E402
from sparkchat.strict_json import dumps, loads  # noqa: E402


class StageTimes:
    """Runs the stages, and knows what they took."""

    def __init__(self, stages: Any) -> None:
        self._run, self.seconds = stages.run, 0.0
        stages.run = self.run

    def run(self, key: Any, stage: Any) -> None:
        began = time.thread_time()
        self._run(key, stage)
        self.seconds += time.thread_time() - began


def opened(folder: Path, requests: int, mode: str, steps: bool = True) -> Engine:
    """An engine some steps behind the prompts of so many requests; ``steps``: whether they want their steps told."""
    target, drafter = str(folder / "target"), str(folder / "drafter-vanilla")
    engine = Engine(
        LoadSpec(
            "fixture", target, drafter, device="cpu", concurrency=requests, threads=1, context=512,
            cost_table=varied_cost(), graphs=True, simulate_acceptance="chat",
        )
    )  # fmt: skip
    for number, prompt in enumerate(random_prompts(requests, 20, seed=1)):
        line = {"prompt_ids": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "mode": mode}
        engine.submit(to_request(line | {"steps": steps}, number))
    while len(engine._scheduler.decoding) < requests:
        engine.step()
    for _ in range(14):
        engine.step()
    return engine


def look() -> float:
    """Milliseconds of a look at what is new, when the processor has had other things to do."""
    passed = bytearray(64 << 20)
    passed[::64] = b"x" * len(passed[::64])
    began = time.thread_time()
    gc.collect(0)
    return (time.thread_time() - began) * 1e3


def measure(engine: Engine, steps: int) -> dict[str, float]:
    stages = StageTimes(engine._captured.stages)  # type: ignore[union-attr]
    gc.collect()
    gc.freeze()
    gc.disable()
    host = send = 0.0
    for _ in range(steps):
        before, began = stages.seconds, time.thread_time()
        events = engine.step()
        host += time.thread_time() - began - (stages.seconds - before)
        began = time.thread_time()
        "".join(dumps(event) + "\n" for event in events).encode()
        send += time.thread_time() - began
    held = len(gc.get_objects())
    texts = [dumps(event) for event in events]
    del events
    left, look_ms = len(gc.get_objects()), look()
    kept: list[Any] = []
    while len(gc.get_objects(0)) < 10_000:
        kept += map(loads, texts)
    looked, kept_ms = len(gc.get_objects(0)), look()
    del kept
    gc.set_debug(gc.DEBUG_SAVEALL)
    circles = gc.collect()
    gc.set_debug(0)
    gc.enable()
    return {
        "host_ms": host * 1e3 / steps, "send_ms": send * 1e3 / steps, "held": held, "left": left, "circles": circles,
        "look_ms": look_ms, "kept": looked, "look_kept_ms": kept_ms,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="8,32")
    parser.add_argument("--modes", default="off,static,compact")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--untold", action="store_true", help="requests want no events of their steps, as in bench")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        write_tiny(Path(name))
        for requests in map(int, options.requests.split(",")):
            for mode in options.modes.split(","):
                found = measure(opened(Path(name), requests, mode, not options.untold), options.steps)
                print(requests, mode, {key: round(value, 3) for key, value in found.items()}, flush=True)


if __name__ == "__main__":
    main()
