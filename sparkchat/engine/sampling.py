"""Logits to laws to tokens, the same code for the target's rows and for the drafter's.

Order: logit bias, penalties, minimum length (``shape_logits``), then temperature, top-k, top-p, min-p, renormalise
(``probabilities``), then an inverse-CDF draw (``draw``). Everything is fp32, and the law that is drawn from is the
law that the acceptance test is given: rounding it anywhere in between would bias the output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from sparkchat.engine.filters import filter_batched, filter_law, top_k_law
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.kernels import cpu
from sparkchat.params import SamplingParams

GREEDY_BELOW = 1e-5
"""A temperature below this means argmax; dividing fp32 logits by less would only lose digits."""

_DRAW_BLOCK = 128
_WORTH_KERNELS = 4096
_LARGEST = torch.finfo(torch.float32).max


class TokenHistory:
    """Which tokens a request has seen, kept up to date token by token.

    Repetition looks at prompt and output, presence and frequency at the output only. Rejected drafts never enter:
    a row's own drafts are passed to ``shape_logits`` instead.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        unique = np.unique(np.fromiter(prompt_ids, dtype=np.int64))
        self._seen = set(unique.tolist())
        self._num_seen = len(unique)
        self._seen_ids = np.zeros(max(64, 2 * len(unique)), dtype=np.int64)
        self._seen_ids[: self._num_seen] = unique
        self._is_seen = np.zeros(0, dtype=bool)  # by token id; filled up to the first _num_marked seen ids
        self._num_marked = 0
        self._output_slot: dict[int, int] = {}
        self._output_ids = np.zeros(64, dtype=np.int64)
        self._output_counts = np.zeros(64, dtype=np.float32)
        self._num_output = 0

    @property
    def num_output(self) -> int:
        return self._num_output

    @property
    def seen_ids(self) -> Tensor:
        """``[S]`` int64, each id of prompt and output once. A view: valid until the next append."""
        return torch.from_numpy(self._seen_ids[: self._num_seen])

    @property
    def output_ids(self) -> Tensor:
        """``[O]`` int64, each id of the output once. A view: valid until the next append."""
        return torch.from_numpy(self._output_ids[: len(self._output_slot)])

    @property
    def output_counts(self) -> Tensor:
        """``[O]`` float32, how often each of ``output_ids`` was delivered. A view."""
        return torch.from_numpy(self._output_counts[: len(self._output_slot)])

    def count(self, token_id: int) -> int:
        """How often the token was delivered."""
        slot = self._output_slot.get(token_id)
        return 0 if slot is None else int(self._output_counts[slot])

    def has_seen(self, token_ids: np.ndarray) -> np.ndarray:
        """Which of ``token_ids [M]`` stand in prompt or output."""
        return self.seen_below(int(token_ids.max()) + 1 if len(token_ids) else 0)[token_ids]

    def seen_below(self, size: int) -> np.ndarray:
        """Whether each token id below ``size`` stands in prompt or output, [size or more] bool. A view."""
        if size > len(self._is_seen):
            self._is_seen = np.zeros(size, dtype=bool)
            self._num_marked = 0
        fresh = self._seen_ids[self._num_marked : self._num_seen]
        self._is_seen[fresh[fresh < len(self._is_seen)]] = True
        self._num_marked = self._num_seen
        return self._is_seen

    def counts_below(self, size: int) -> np.ndarray:
        """How often each token id below ``size`` was delivered, [size] float32."""
        counts = np.zeros(size, dtype=np.float32)
        ids = self._output_ids[: len(self._output_slot)]
        is_below = ids < size
        counts[ids[is_below]] = self._output_counts[: len(ids)][is_below]
        return counts

    def counts_of(self, token_ids: np.ndarray) -> np.ndarray:
        """How often each of ``token_ids [M]`` was delivered, float32."""
        return np.array([self.count(int(token_id)) for token_id in token_ids], dtype=np.float32)

    def append(self, token_id: int) -> None:
        """Record one delivered token; amortised constant time."""
        self._num_output += 1
        if token_id not in self._seen:
            self._seen.add(token_id)
            self._seen_ids = _with_room(self._seen_ids, self._num_seen)
            self._seen_ids[self._num_seen] = token_id
            self._num_seen += 1
        slot = self._output_slot.setdefault(token_id, len(self._output_slot))
        if slot == len(self._output_slot) - 1:
            self._output_ids = _with_room(self._output_ids, slot)
            self._output_counts = _with_room(self._output_counts, slot)
            self._output_ids[slot] = token_id
        self._output_counts[slot] += 1

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.append(token_id)


def _with_room(buffer: np.ndarray, index: int) -> np.ndarray:
    return buffer if index < len(buffer) else np.concatenate((buffer, np.zeros_like(buffer)))


def is_greedy(temperature: float) -> bool:
    return temperature < GREEDY_BELOW


def check_logits(logits: Tensor, what: str = "the model") -> None:
    """Raise DamagedFile when a row of ``[n, V]`` holds NaN or +inf, or nothing above -inf."""
    _check_peaks(logits.amax(dim=-1), what)


def _check_peaks(peaks: Tensor, what: str) -> None:
    # NaN and +inf both reach the maximum, so one pass finds them all.
    if not bool(torch.isfinite(peaks).all()):
        raise DamagedFile(f"{what} gave logits that are not numbers: its weights are damaged; fetch it again")


def shape_logits(
    logits: Tensor,
    history: TokenHistory,
    params: SamplingParams,
    *,
    num_output: int,
    extra: Sequence[Sequence[int]],
    eos_ids: Collection[int],
    index_of: Tensor | None = None,
) -> Tensor:
    """Apply logit bias, penalties and minimum length IN PLACE to ``[n, V]`` float32 rows of one request; returns them.

    Row i stands after the prompt, ``num_output`` delivered tokens and the drafts ``extra[i]``, which count as
    delivered for that row alone. ``eos_ids`` are the ids that end an answer, explicit stop ids included. With
    ``index_of`` (``[V]`` int64, draft index of each target id or -1) the rows are over the draft vocabulary and ids
    it lacks are skipped. Raises UsageError when a bias names an id outside the vocabulary, or when nothing is left.
    """
    vocab = logits.shape[-1] if index_of is None else index_of.shape[0]
    if params.logit_bias:
        _add_bias(logits, params.logit_bias, vocab, index_of)
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        _penalise(logits, history, params, extra, index_of)
    must_go_on: list[int] = []
    if not params.ignore_eos:
        must_go_on = [row for row, ids in enumerate(extra) if num_output + len(ids) < params.min_tokens]
    if must_go_on:
        _forbid(logits, must_go_on, [token_id for token_id in eos_ids if token_id < vocab], index_of)
    if (must_go_on or params.logit_bias) and bool((logits.amax(dim=-1) == -torch.inf).any()):
        raise UsageError("logit_bias and min_tokens together forbid every token; forbid fewer")
    return logits


def _add_bias(logits: Tensor, bias: tuple[tuple[int, float], ...], vocab: int, index_of: Tensor | None) -> None:
    outside = [token_id for token_id, _ in bias if token_id >= vocab]
    if outside:
        raise UsageError(f"logit_bias id {outside[0]} is not a token of this model; give ids from 0 to {vocab - 1}")
    total: dict[int, float] = {}
    for token_id, value in bias:
        # +inf means "always this one"; the largest float says the same and keeps sums and differences defined.
        total[token_id] = min(total.get(token_id, 0.0) + min(value, _LARGEST), _LARGEST)
    columns, kept = _columns(list(total), index_of, logits.device)
    values = torch.tensor(list(total.values()), dtype=torch.float32, device=logits.device)[kept]
    logits[:, columns] = (logits[:, columns] + values).clamp(max=_LARGEST)


def _columns(
    ids: Sequence[int] | Tensor, index_of: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor | slice]:
    """Logits columns of target ids, and which of the ids have one."""
    columns = torch.as_tensor(ids, dtype=torch.int64).to(device)
    if index_of is None:
        return columns, slice(None)
    columns = index_of.to(device)[columns]
    kept = columns >= 0
    return columns[kept], kept


def _penalise(
    logits: Tensor,
    history: TokenHistory,
    params: SamplingParams,
    extra: Sequence[Sequence[int]],
    index_of: Tensor | None,
) -> None:
    """Repetition, then presence and frequency: the history on all rows, the drafts on their own rows."""
    device = logits.device
    if device.type == "cpu" and index_of is None:
        _penalise_here(logits.numpy(), history, params, extra)
        return
    # JSON writes whole numbers that torch refuses beside floats.
    repetition, presence, frequency = map(
        float, (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    )
    cells = _draft_cells(history, extra, index_of, device) if any(extra) else None
    raw = None if cells is None else logits[cells[0], cells[1]]
    if repetition != 1.0:
        seen, _ = _columns(history.seen_ids, index_of, device)
        logits[:, seen] = _repeat(logits[:, seen], repetition)
    if presence or frequency:
        said, kept = _columns(history.output_ids, index_of, device)
        times = history.output_counts.to(device)[kept]
        logits[:, said] -= presence + frequency * times
    if cells is not None and raw is not None:
        rows, columns, counts = cells
        logits[rows, columns] = _repeat(raw, repetition) - (presence + frequency * counts)


@np.errstate(over="ignore", invalid="ignore")  # what is no number is found and reported
def _penalise_here(
    logits: np.ndarray, history: TokenHistory, params: SamplingParams, extra: Sequence[Sequence[int]]
) -> None:
    """The same on a processor: a dozen calls of torch take as long as a layer of a small model."""
    cells = _cells_of(history, extra)
    rows, columns = [cell[0] for cell in cells], [cell[1] for cell in cells]
    raw = logits[rows, columns] if cells else None
    if params.repetition_penalty != 1.0:
        seen = history.seen_ids.numpy()
        logits[:, seen] = _repeat_here(logits[:, seen], params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        said, times = history.output_ids.numpy(), history.output_counts.numpy()
        logits[:, said] -= params.presence_penalty + params.frequency_penalty * times
    if raw is not None:
        counts = np.array([cell[2] for cell in cells], dtype=np.float32)
        taken = params.presence_penalty + params.frequency_penalty * counts
        logits[rows, columns] = _repeat_here(raw, params.repetition_penalty) - taken


def _repeat_here(values: np.ndarray, penalty: float) -> np.ndarray:
    return np.where(values < 0, values * penalty, values / penalty)


def _cells_of(history: TokenHistory, extra: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Row, token and output count of every cell that a draft of that row touches."""
    return [
        (row, token, history.count(token) + n) for row, ids in enumerate(extra) for token, n in Counter(ids).items()
    ]


def _draft_cells(
    history: TokenHistory, extra: Sequence[Sequence[int]], index_of: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """``_cells_of`` with columns for tokens."""
    cells = _cells_of(history, extra)
    rows = torch.tensor([cell[0] for cell in cells], dtype=torch.int64, device=device)
    counts = torch.tensor([cell[2] for cell in cells], dtype=torch.float32, device=device)
    columns, kept = _columns([cell[1] for cell in cells], index_of, device)
    return rows[kept], columns, counts[kept]


def _repeat(values: Tensor, penalty: float) -> Tensor:
    """Hugging Face's rule: a seen token's logit moves towards "less likely" on both sides of zero."""
    return torch.where(values < 0, values * penalty, values / penalty)


def _forbid(logits: Tensor, rows: Sequence[int], ids: Sequence[int], index_of: Tensor | None) -> None:
    columns, _ = _columns(ids, index_of, logits.device)
    logits[torch.tensor(rows, device=logits.device)[:, None], columns] = -torch.inf


def has_kernels(rows: Tensor) -> bool:
    """Whether ``kernels.cpu.laws`` takes these rows [n, V]: on a processor that it is made for, where a pass counts.

    How they lie in memory does not matter, so that a row has the same law alone and among others.
    """
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and rows.shape[-1] >= _WORTH_KERNELS
        and cpu.is_supported()
    )


def row_peaks(logits: Tensor) -> Tensor:
    """[n, V] float32 -> [n]: the largest of each row, NaN where a row has one."""
    if not has_kernels(logits):
        return logits.amax(dim=-1)
    from sparkchat.kernels.cpu.laws import find_peaks

    peaks = torch.empty(logits.shape[0])
    find_peaks(logits.contiguous().numpy(), peaks.numpy())
    return peaks


def are_numbers(logits: Tensor) -> bool:
    """Whether the largest of every row [n, V] is a number, and no row has NaN."""
    if not has_kernels(logits):
        return bool(logits.amax(dim=-1).isfinite().all())
    from sparkchat.kernels.cpu.laws import find_peaks

    peaks = np.empty(logits.shape[0], np.float32)
    find_peaks(logits.contiguous().numpy(), peaks)
    return bool(np.isfinite(peaks).all())


def probabilities(
    logits: Tensor,
    temperature: Sequence[float] | Tensor,
    top_k: Sequence[int] | Tensor,
    top_p: Sequence[float] | Tensor,
    min_p: Sequence[float] | Tensor,
) -> Tensor:
    """The law of every row: ``[n, V]`` float32 logits to ``[n, V]`` float32 probabilities, settings ``[n]`` per row.

    Temperature, then top-k (ties at the k-th place stay), then top-p (the smallest set of the k whose renormalised
    mass reaches it; of equal tokens the lowest ids), then min-p (relative to the most likely token), renormalised.
    Greedy rows are one-hot at the argmax, lowest id on ties, whatever the filters. -inf logits are impossible
    tokens. Raises DamagedFile on NaN, +inf, or a row of nothing but -inf. A row does not depend on the others.
    """
    settings = list(zip(*(_host(values) for values in (temperature, top_k, top_p, min_p)), strict=True))
    peaks = row_peaks(logits)
    _check_peaks(peaks, "the model")
    if all(is_greedy(row[0]) for row in settings):
        return torch.zeros_like(logits).scatter_(-1, argmax_ids(logits)[:, None], 1.0)
    if logits.device.type == "cpu":
        return _laws_by_row(logits, peaks, settings)
    return _laws_batched(logits, peaks, settings)


def _laws_by_row(logits: Tensor, peaks: Tensor, settings: Sequence[tuple[float, ...]]) -> Tensor:
    if has_kernels(logits):
        return _laws_by_kernel(logits, peaks, settings)
    laws = torch.zeros_like(logits)
    scaled = torch.empty_like(logits[0])
    for row, peak, law, (temperature, top_k, top_p, min_p) in zip(logits, peaks, laws, settings, strict=True):
        if is_greedy(temperature):
            law[row.numpy().argmax()] = 1.0
        elif 0 < top_k < len(row):
            top_k_law(row.numpy(), temperature, int(top_k), top_p, min_p, law.numpy())
        else:
            # Less the peak first: keeps digits, and a tiny temperature from overflowing.
            at_one = row if temperature == 1.0 else torch.sub(row, peak, out=scaled).div_(temperature)
            torch.softmax(at_one, dim=0, out=law)
            if top_p < 1.0 or min_p > 0.0:
                filter_law(law.numpy(), top_p, min_p)
    return laws


def _laws_by_kernel(logits: Tensor, peaks: Tensor, settings: Sequence[tuple[float, ...]]) -> Tensor:
    from sparkchat.kernels.cpu.laws import soften

    logits = logits.contiguous()
    laws = torch.empty_like(logits)
    rows = zip(logits.numpy(), peaks.tolist(), laws.numpy(), settings, strict=True)
    for row, peak, law, (temperature, top_k, top_p, min_p) in rows:
        if is_greedy(temperature):
            law[:] = 0.0
            law[row.argmax()] = 1.0
        elif 0 < top_k < len(row):
            law[:] = 0.0
            top_k_law(row, temperature, int(top_k), top_p, min_p, law)
        else:
            soften(row, peak, temperature, law)
            if top_p < 1.0 or min_p > 0.0:
                filter_law(law, top_p, min_p)
    return laws


def _laws_batched(logits: Tensor, peaks: Tensor, settings: Sequence[tuple[float, ...]]) -> Tensor:
    greedy = [i for i, row in enumerate(settings) if is_greedy(row[0])]
    scale = torch.tensor([1.0 if is_greedy(row[0]) else row[0] for row in settings], device=logits.device)
    laws = torch.softmax((logits - peaks[:, None]).div_(scale[:, None]), dim=-1)
    filtered = [i for i, (_, k, p, m) in enumerate(settings) if i not in greedy and (k > 0 or p < 1.0 or m > 0.0)]
    if filtered:
        filter_batched(laws, logits, filtered, *zip(*(settings[i][1:] for i in filtered), strict=True))
    if greedy:
        laws[greedy] = torch.zeros_like(logits[greedy]).scatter_(-1, argmax_ids(logits[greedy])[:, None], 1.0)
    return laws


def _host(values: Sequence[float] | Tensor) -> list[float]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


def argmax_ids(logits: Tensor) -> Tensor:
    """``[n, V]`` to ``[n]`` int64: the most likely id of each row, the lowest one on ties."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # torch's CPU argmax is an order of magnitude slower over a vocabulary.
        return torch.from_numpy(logits.detach().numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """One id per row, ``[n]`` int64, by inverse CDF from ``[n, V]`` float32 weights and ``u [n]`` in [0, 1).

    Weights need not sum to one but must not all be zero. An id of weight zero is never returned, whatever u is.
    """
    n, vocab = weights.shape
    if has_kernels(weights):
        from sparkchat.kernels.cpu.laws import draw_rows

        drawn = torch.empty(n, dtype=torch.int64)
        draw_rows(weights.contiguous().numpy(), u.to(torch.float64).contiguous().numpy(), drawn.numpy())
        return drawn
    u = u.to(weights.device, torch.float64)[:, None]
    if vocab % _DRAW_BLOCK or vocab == _DRAW_BLOCK:
        return _search(weights.double(), u * weights.sum(dim=-1, keepdim=True, dtype=torch.float64))[:, 0]
    # Two levels: which block of the vocabulary, then where in it. One pass over the row instead of a full scan.
    blocks = weights.reshape(n, -1, _DRAW_BLOCK)
    masses = blocks.sum(dim=-1).double()
    target = u * masses.sum(dim=-1, keepdim=True)
    block = _search(masses, target)
    before = masses.cumsum(dim=-1).gather(1, block) - masses.gather(1, block)
    inside = blocks[torch.arange(n, device=weights.device), block[:, 0]].double()
    return (block * _DRAW_BLOCK + _search(inside, target - before))[:, 0]


def _search(weights: Tensor, target: Tensor) -> Tensor:
    """First index ``[n, 1]`` whose running sum exceeds ``target [n, 1]``; the last of positive weight if none does."""
    # Rounding may leave a target just below zero, where a leading weight of zero would match.
    found = torch.searchsorted(weights.cumsum(dim=-1), target.clamp(min=0.0), right=True)
    positions = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, positions, 0).amax(dim=-1, keepdim=True)
    return torch.minimum(found, last)
