from pathlib import Path

import pytest
import torch

from sparkchat.train.chat_tokens import ChatTokens, load_chat_tokens
from sparkchat.train.config import DrafterShape
from sparkchat.train.drafter import TrainingDrafter
from sparkchat.train.losses import VocabularyHead, vocabulary_head
from sparkchat.train.target import Target, load_target
from train.toy_target import write_toy_target

TAPS = (1, 2, 3)


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_target(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def target(toy_folder: Path) -> Target:
    return load_target(toy_folder, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="session")
def tokens(toy_folder: Path) -> ChatTokens:
    return load_chat_tokens(toy_folder)


@pytest.fixture
def drafter(target: Target) -> TrainingDrafter:
    """An untrained drafter whose parts all matter: weights far from zero, scaled inputs."""
    torch.manual_seed(1)
    drafter = TrainingDrafter(target, DrafterShape(markov_rank=8, draft_vocab_size=200, num_taps=3), TAPS, 3)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(6)
    drafter.feature_scale.copy_(0.5 + torch.rand_like(drafter.feature_scale))
    return drafter


@pytest.fixture
def head(target: Target) -> VocabularyHead:
    chosen = torch.randperm(target.shape.vocab_size, generator=torch.Generator().manual_seed(2))[:200]
    chosen = torch.cat([torch.arange(4), chosen[chosen >= 4]])[:200]
    return vocabulary_head(target.head, chosen.sort().values)
