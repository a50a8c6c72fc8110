"""`pengserve profile`: what it takes. The work is in `simulator/profiling/`, imported when the command runs."""

from pathlib import Path
from typing import Annotated

import typer


def profile(
    model: Annotated[str, typer.Argument(help="Hugging Face model directory (or hub name).", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the profile.", show_default=True)
    ] = Path("profile.yaml"),
    name: Annotated[
        str | None, typer.Option(help="Name of the profile.  [default: that of the file]", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="A setting of vLLM, as `name=value`; several may follow.", show_default=False),
    ] = None,
    batches: Annotated[int, typer.Option(min=24, help="Different batches to time.")] = 150,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each is timed; the fastest counts.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the batches.")] = 0,
) -> None:
    """Time steps of one vLLM engine on this machine, and write what simulations need to know of them.

    The profile holds the coefficients of KunServe's cost model, fitted on most of the batches, and how far it is off
    on the others. Simulations take it in place of a GPU and a model.

    - `pengserve profile ./demo-model --engine dtype=float32 -o laptop.yaml`
    """
    raise NotImplementedError
