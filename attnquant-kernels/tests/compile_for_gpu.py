"""Compile the op for a GPU that need not be there; devices are set per process."""

from __future__ import annotations

import os
import sys

from max.driver import (
    Accelerator,
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)


def compile_for(api: str, target: str) -> object:
    """Return what has to live as long as the process."""
    set_virtual_device_api(api)
    set_virtual_device_target_arch(target)
    set_virtual_device_count(1)
    # After the lines above: MAX looks for devices on import.
    from max.dtype import DType
    from max.engine import InferenceSession
    from max.graph import DeviceRef, Graph, TensorType

    from attnquant_kernels import mojo_package
    from attnquant_kernels.graph import Projection, generated_linear

    shapes = [("rows", "in"), ("a", "in"), ("a", "r"), ("r",), ("r", "in"), ("b", "in")]
    types = [TensorType(DType.bfloat16, shape, DeviceRef.GPU()) for shape in shapes]
    with Graph("gpu", input_types=types, custom_extensions=[mojo_package()]) as graph:
        x, *factored, plain = [value.tensor for value in graph.inputs]
        projections = [Projection(*factored), Projection(plain)]
        graph.output(generated_linear(x, projections))
    session = InferenceSession(devices=[Accelerator()])
    return session, session.load(graph)


if __name__ == "__main__":
    compiled = compile_for(*sys.argv[1:])
    print(f"compiled for {sys.argv[2]}", flush=True)
    # MAX 26.7 may abort while it takes down the device that is not there, which says
    # nothing about what was compiled.
    os._exit(0)
