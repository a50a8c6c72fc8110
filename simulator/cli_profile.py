"""`pengserve profile`: what it takes. The work is in `profiling.py`, imported when the command runs."""

from pathlib import Path
from typing import Annotated

import typer


def profile(
    model: Annotated[str, typer.Argument(help="Hugging Face model directory (or hub name).", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile.")] = Path("profile.yaml"),
    name: Annotated[
        str | None, typer.Option(help="Name of the profile; without it, that of the file.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    gpu: Annotated[
        str | None, typer.Option(help="Whose memory and links to take; without it, what is found.", show_default=False)
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", "-e", help="A setting of vLLM, `name=value`; any number.", show_default=False),
    ] = None,
    batches: Annotated[int, typer.Option(min=24, help="Different batches to time.")] = 150,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all batches; each batch's fastest counts.")] = 3,
    repetitions: Annotated[int, typer.Option(min=1, help="Steps of a batch in one round; their median counts.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the batches.")] = 0,
) -> None:
    """Time steps of one vLLM engine on this machine, and write what simulations need to know of them.

    Batches of random prefixes, new tokens and decodes are run, and KunServe's cost model is fitted on 70 % of them. The
    error on the others is printed and kept. A simulation takes the profile in place of a GPU and a model.

    - `pengserve profile ./demo-model --engine dtype=float32 -o laptop.yaml`
    - `pengserve profile meta-llama/Llama-3.1-8B -e max_num_batched_tokens=8192 -e max_model_len=16384`
    """
    from pengserve.simulator.profiling import Wishes, run_profile

    run_profile(
        Wishes(
            model=model,
            output=output,
            name=name or output.stem,
            device=device,
            gpu=gpu,
            engine=tuple(engine or ()),
            num_batches=batches,
            rounds=rounds,
            repetitions=repetitions,
            seed=seed,
        )
    )
