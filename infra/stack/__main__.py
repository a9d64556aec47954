"""`python -m infra.stack kafka|s3|down`, for the Makefile before the command line is installed."""

import logging
import sys
import threading

from infra.errors import Explained
from infra.stack.kafka_install import ensure_jars
from infra.stack.local import stop_stack
from infra.stack.paths import StackPaths
from infra.stack.s3_binary import ensure_binary

log = logging.getLogger("infra.stack")


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    paths, cancel = StackPaths.locate(), threading.Event()
    try:
        match arguments:
            case ["kafka"]:
                fetched = ensure_jars(paths, cancel=cancel)
                log.info("Kafka's jars: %s in %s", "fetched" if fetched else "there already", paths.kafka_lib)
            case ["s3"]:
                built = ensure_binary(paths, cancel=cancel)
                log.info("versitygw: %s in %s", "built" if built else "there already", paths.bin)
            case ["down"]:
                log.info("stopped %d processes", stop_stack(paths=paths))
            case _:
                log.error("usage: python -m infra.stack kafka|s3|down")
                return 2
    except Explained as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
