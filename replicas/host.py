"""An instance as a plain process, without Ray: for tests, benchmarks and debugging.

    python -m pengserve.replicas.host --config CONFIG.json [--instance-id 0] [--incarnation 0]

CONFIG.json holds the fields of `InstanceConfig`. One JSON line on standard output says when it is ready, with its
endpoint; SIGTERM drains and stops it.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import PengServeError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.environment import process_environment
from pengserve.replicas.instance import Instance, require_ready


def main() -> int:
    """Runs one instance until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the fields of InstanceConfig")
    parser.add_argument("--instance-id", type=int, default=0)
    parser.add_argument("--incarnation", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    # vLLM logs to standard output, which here carries one line for whoever started the process.
    announcement = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = from_data(InstanceConfig, json.loads(arguments.config.read_text()))
    os.environ.update(process_environment(config))
    key = InstanceKey(instance_id=InstanceId(arguments.instance_id), incarnation=arguments.incarnation)
    instance = Instance(config, key)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    instance.start()
    try:
        require_ready(instance, timeout_s=600)
        announcement.write(json.dumps(to_data(instance.status())) + "\n")
        announcement.flush()
        ended.wait()
        instance.drain(config.drain_timeout_s)
    except PengServeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        instance.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
