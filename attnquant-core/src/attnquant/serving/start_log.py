"""What AttnQuant adds to MAX's log while a model is loaded: a line for each fact."""

from __future__ import annotations

import logging
import time

from max.graph import Graph
from max.graph import Module as GraphModule
from max.pipelines.lib.graph_specs import GraphSpec

from attnquant.plugins import Supplied
from attnquant.settings import Settings
from attnquant.sizes import format_bytes

# Below MAX's own name, since MAX's console shows no other.
logger = logging.getLogger("max.pipelines.attnquant")


class Stopwatch:
    """Adds up the seconds of what is done in turns.

    Attributes:
        seconds: By name, what its laps took.
    """

    def __init__(self) -> None:
        """Start the first lap."""
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        """Count what has passed since the last lap for a name."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


def log_weights(
    supplied: Supplied,
    num_layers: int,
    settings: Settings,
    sizes: tuple[int, int],
    clock: Stopwatch,
) -> None:
    """Say who serves a model, as what, and how long its weights took.

    Args:
        supplied: The architecture and its plugin.
        num_layers: L.
        settings: What it is served with.
        sizes: Bytes of the weights, and what they would be with projections
            multiplied out.
        clock: The seconds of ``weights`` and, at such a start, ``decomposition``.
    """
    plugin = supplied.plugin
    logger.info(
        "AttnQuant: %s is served by plugin %s (%s)",
        supplied.architecture.name,
        plugin.name,
        plugin.origin,
    )
    logger.info(
        "AttnQuant: G=%d of %d layers, r=%d, tie=%s, formulation=%s (from %s)",
        settings.shared_blocks,
        num_layers,
        settings.lora_rank,
        settings.tie_families,
        settings.formulation,
        settings.origin,
    )
    served, dense = sizes
    logger.info(
        "AttnQuant: weights of %s; dense they would be %s (%.2f times as much)",
        format_bytes(served),
        format_bytes(dense),
        dense / served,
    )
    logger.info("AttnQuant: weights loaded in %.1f s", clock.seconds["weights"])
    if (seconds := clock.seconds.get("decomposition")) is not None:
        logger.info("AttnQuant: decomposed in %.1f s", seconds)


class TimedGraphSpec(GraphSpec):
    """MAX's, with a line for the time its graph took to build."""

    def trace(self, module: GraphModule | None = None) -> Graph:
        """Build the graph, into ``module`` if given."""
        clock = Stopwatch()
        graph = super().trace(module)
        clock.lap("graph")
        logger.info(
            "AttnQuant: graph %s built in %.1f s", self.name, clock.seconds["graph"]
        )
        return graph
