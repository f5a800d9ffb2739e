"""A rank of test_publishing.py: publishes messages into memory that several processes share, by the interpreter.

python publishing_rank.py RANK RANKS MESSAGES FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from sparkchat.kernels.ranks import num_pads, publish

SIZES = (6 * 64, 2048, 5000)
MOST = 4 * max(SIZES)


def main(rank: int, ranks: int, messages: int, folder: str) -> None:
    def shared(name: str, count: int) -> torch.Tensor:
        return torch.from_file(f"{folder}/{name}", shared=True, size=count, dtype=torch.int32)

    slots = [[shared(f"slot{turn}-{r}", MOST // 4) for r in range(ranks)] for turn in range(2)]
    flags = [shared(f"pads-{r}", num_pads(MOST, ranks)) for r in range(ranks)]
    pads = torch.tensor([one.data_ptr() for one in flags])
    for number in range(messages):
        turn, size = number % 2, SIZES[number % len(SIZES)]
        x = torch.arange(size, dtype=torch.int32) * (rank + 1) + number
        publish(x, slots[turn][rank][:size], pads, rank)
        for other in range(ranks):
            wanted = torch.arange(size, dtype=torch.int32) * (other + 1) + number
            assert torch.equal(slots[turn][other][:size], wanted), (rank, other, number)
    # Whoever is last finds all flags down again; another may still have its last ones up.
    print("all alike", int(flags[rank].sum()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
