"""The conformance kit: one subclass with a tiny config is a package's whole test.

```python
from attnquant.testing import ModelConformance


class TestTiny(ModelConformance):
    architecture = "TinyForCausalLM"
    config = {...}

    def tensor_shapes(self): ...

    def reference(self, weights, tokens): ...
```

Its tests fall into three parts: *structural* needs no MAX and takes seconds, *hooks*
needs MAX and compiles nothing, *serving* compiles one model for each formulation.
"""

from __future__ import annotations

from attnquant.testing.conformance.hooks import HooksConformance
from attnquant.testing.conformance.serving import ServingConformance
from attnquant.testing.conformance.structural import StructuralConformance

__all__ = ["ModelConformance"]


class ModelConformance(StructuralConformance, HooksConformance, ServingConformance):
    """What a model package must keep; see `ConformanceModel` for what to supply."""
