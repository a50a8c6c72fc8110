"""Which layers a stage of a pipeline has."""

from pengserve.planners.types.errors import UnsupportedShapeError


def stage_layers(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of layers by stage: as even as can be, and the last stage never has most (it also samples).

    Raises:
        UnsupportedShapeError: there are fewer layers than stages.
    """
    if num_stages > num_layers:
        raise UnsupportedShapeError(f"{num_layers} layers do not fill {num_stages} stages")
    small, rest = divmod(num_layers, num_stages)
    # vLLM gives what is left over to the stages before the last one, from the back.
    sizes = [small + (num_stages - 1 - rest <= stage < num_stages - 1) for stage in range(num_stages)]
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
