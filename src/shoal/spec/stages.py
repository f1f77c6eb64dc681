"""Which layers each pipeline stage holds, and which stages each process: balanced by what the layers cost. No torch.

The costliest stage sets the pace of a pipeline, so that is what is made as small as it can be; where a process holds
two stages, the costliest process comes next. Embedding and head count: with 128k words the head alone weighs as much
as two to three layers, and a split by layer count makes the last stage the slowest by that much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise

from shoal.errors import SpecError
from shoal.spec.mixers import KINDS
from shoal.spec.shape import Shape

TWO_STAGES = ("interleaved", "zbv")  # schedules that put two stages on a process

# A lookup computes nothing, but it moves a token's row of numbers: read and written forwards in 2 bytes, read and added
# to a 4-byte gradient backwards. An accelerator could have computed about 200 FLOPs for each byte it waits for.
LOOKUP_BYTES = 2 + 2 + 2 + 8
FLOPS_PER_BYTE = 200


def stage_count(pp: int, schedule: str) -> int:
    return pp * (2 if schedule in TWO_STAGES else 1)


def stages_of(pp_rank: int, pp: int, schedule: str) -> list[int]:
    """The stages that one process of the pipeline holds. In a "V" (zbv) the first process also has the last stage."""
    if schedule == "interleaved":
        return [pp_rank, pp_rank + pp]
    if schedule == "zbv":
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return [pp_rank]


def micro_batches_fit(micro_batches: int, pp: int, schedule: str) -> bool:
    """Whether the schedule can run so many micro-batches, by the conditions of torch.distributed.pipelining: 1F1B must
    fill its pipeline, interleaved goes in rounds of equal size. More is better in all of them: the pipeline stands idle
    while it fills and empties."""
    if schedule == "1f1b":
        return micro_batches >= pp
    if schedule == "interleaved":
        return micro_batches >= 1 and micro_batches % max(1, micro_batches // pp) == 0
    return micro_batches >= 1


def stretches(shape: Shape, pp: int, schedule: str, seq_len: int | None = None) -> list[range]:
    """The layers of each stage, in the order of the stages."""
    stages = stage_count(pp, schedule)
    if shape.layers < stages:
        raise SpecError(
            f"{shape.layers} layers cannot fill {stages} pipeline stages (mesh.pp {pp}, schedule {schedule}): "
            f"lower mesh.pp to at most {shape.layers // (stages // pp)}."
        )
    costs = layer_costs(shape, shape.max_seq_len if seq_len is None else seq_len)
    return [range(start, end) for start, end in pairwise(_cuts(tuple(costs), pp, schedule))]


@lru_cache(maxsize=256)  # a planner asks for the same few again and again
def _cuts(costs: tuple[float, ...], pp: int, schedule: str) -> list[int]:
    stages = stage_count(pp, schedule)
    limit = _least_maximum(costs, stages)
    return _best_pairs(costs, pp, schedule, limit) if schedule in TWO_STAGES else _most_even(costs, stages, limit)


def layer_costs(shape: Shape, seq_len: int) -> list[float]:
    """Training FLOPs a token of each layer, the embedding's cost in the first and the head's in the last."""
    costs = [_block_cost(shape, layer, seq_len) for layer in range(shape.layers)]
    costs[0] += LOOKUP_BYTES * FLOPS_PER_BYTE * shape.dim
    costs[-1] += 6 * shape.vocab_size * shape.dim
    return costs


def _block_cost(shape: Shape, layer: int, seq_len: int) -> float:
    window = seq_len
    if shape.sliding_window is not None and shape.slides(layer):
        window = min(window, shape.sliding_window)
    seen = window - window**2 / (2 * seq_len)  # keys that a query sees, on average over the sequence
    kind = KINDS[shape.mixer(layer)]
    return 6 * shape.layer_params(layer) + kind.flops_per_pair(shape) * seen + kind.flops_per_token(shape)


def _least_maximum(costs: Sequence[float], stages: int) -> float:
    """The smallest possible cost of the costliest of so many contiguous stages, each of one layer at least."""
    total = [0.0, *accumulate(costs)]
    layers = len(costs)
    best = [*total[:1], *([float("inf")] * layers)]  # [end]: the layers before `end` in the stages so far
    for stage in range(1, stages + 1):
        best = [
            min((max(best[start], total[end] - total[start]) for start in range(stage - 1, end)), default=float("inf"))
            for end in range(layers + 1)
        ]
    return best[layers]


def _most_even(costs: Sequence[float], stages: int, limit: float) -> list[int]:
    """Where to cut so that no stage costs more than `limit`; of such cuts, those with the least sum of squares."""
    total = [0.0, *accumulate(costs)]

    @cache
    def rest(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 0:
            return (0.0, ()) if start == len(costs) else (float("inf"), ())
        best: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for end, cost in _stages_from(total, start, limit):
            square, cuts = rest(end, left - 1)
            best = min(best, (square + cost**2, (end, *cuts)))
        return best

    return [0, *rest(0, stages)[1]]


def _best_pairs(costs: Sequence[float], pp: int, schedule: str, limit: float) -> list[int]:
    """Where to cut for two stages a process: none above `limit`, and the costliest process as cheap as it can be.

    Processes are filled one after the other. The first stages of all go from the first layer on; the second ones
    come down from the last layer (zbv), or go up from where the first ones will end (interleaved: each such place is
    tried).
    """
    total = [0.0, *accumulate(costs)]
    layers = len(costs)
    if schedule == "zbv":
        ends = _fill(total, limit, 0, layers, layers, 0, pp)[2]
        # The last process's two stages meet: its first one's end is its second one's beginning.
        return [0, *(end for end, _ in ends), *(start for _, start in reversed(ends[:-1])), layers]
    plan = min(_fill(total, limit, 0, middle, middle, layers, pp) for middle in range(pp, layers - pp + 1))
    return [0, *(end for end, _ in plan[2]), *(end for _, end in plan[2])]


Plan = tuple[float, float, tuple[tuple[int, int], ...]]  # costliest process, sum of squares, ends of the stages
IMPOSSIBLE: Plan = (float("inf"), float("inf"), ())


def _fill(total: Sequence[float], limit: float, low: int, middle: int, high: int, top: int, pp: int) -> Plan:
    """The best way for `pp` processes to take [low, middle) and, upwards from `high`, [high, top); downwards from
    `high` to where they meet the former when top is 0."""
    down = top == 0

    def fits(start: int, end: int, stages: int) -> bool:
        """Whether so many stages can still take [start, end): else no need to look further."""
        return stages <= end - start and total[end] - total[start] <= stages * limit * (1 + 1e-9)

    @cache
    def rest(low: int, high: int, left: int) -> Plan:
        if left == 0:
            done = low == high if down else (low == middle and high == top)
            return (0.0, 0.0, ()) if done else IMPOSSIBLE
        best = IMPOSSIBLE
        for end, first in _stages_from(total, low, limit):
            if not down and not fits(end, middle, left - 1):
                continue
            for other, second in _stages_to(total, high, limit) if down else _stages_from(total, high, limit):
                if not (fits(end, other, 2 * (left - 1)) if down else fits(other, top, left - 1)):
                    continue
                most, squares, ends = rest(end, other, left - 1)
                plan = (max(most, first + second), squares + first**2 + second**2, ((end, other), *ends))
                best = min(best, plan)
        return best

    return rest(low, high, pp)


def _stages_from(total: Sequence[float], start: int, limit: float) -> Iterator[tuple[int, float]]:
    """The ends, with their costs, of the stages from `start` on that stay within the limit."""
    for end in range(start + 1, len(total)):
        cost = total[end] - total[start]
        if cost > limit * (1 + 1e-12):  # sums of the same numbers may differ in their last digit
            return
        yield end, cost


def _stages_to(total: Sequence[float], end: int, limit: float) -> Iterator[tuple[int, float]]:
    for start in range(end - 1, -1, -1):
        cost = total[end] - total[start]
        if cost > limit * (1 + 1e-12):
            return
        yield start, cost
