"""Python's garbage collector in a process that runs a controller."""

import gc


def spare_the_loop() -> None:
    """Keeps full collections off the control loop. The process's entry point calls it once all is imported.

    States, answers and plans are values without cycles: reference counts free them, and a collection finds little.
    By default a thousand instances' answers call for a full one every few ticks, of 30 ms and more each.
    """
    gc.collect()
    gc.freeze()  # modules live as long as the process
    # Counted are objects made less objects freed: above what the answers of one tick are, the old ones go before it.
    gc.set_threshold(200_000, 20, 100)
