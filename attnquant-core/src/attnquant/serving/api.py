"""What a model package builds on: the public names of the serving half, in one place.

Whatever is not listed here may change with any release of attnquant-core.
"""

from attnquant.serving.decoder import AttnQuantDecoder, AttnQuantTextModel
from attnquant.serving.device import check_device, check_sandwich_norms
from attnquant.serving.encodings import with_flags
from attnquant.serving.linear import AttnQuantLinear, StackedProjection
from attnquant.serving.mlp import AttnQuantMLP
from attnquant.serving.model_config import AttnQuantConfigMixin, settings_of
from attnquant.serving.pipeline_model import AttnQuantPipelineModelMixin
from attnquant.serving.projections import ProjectionMaker
from attnquant.serving.requests import CheckedRequestsMixin, CheckedTextTokenizer
from attnquant.serving.text_pipeline import (
    AttnQuantTextPipelineModel,
    TextBatchProcessor,
)
from attnquant.serving.weight_adapter import GRAPH_PREFIX, Adapted, WeightAdapter

__all__ = [
    "GRAPH_PREFIX",
    "Adapted",
    "AttnQuantConfigMixin",
    "AttnQuantDecoder",
    "AttnQuantLinear",
    "AttnQuantMLP",
    "AttnQuantPipelineModelMixin",
    "AttnQuantTextModel",
    "AttnQuantTextPipelineModel",
    "CheckedRequestsMixin",
    "CheckedTextTokenizer",
    "ProjectionMaker",
    "StackedProjection",
    "TextBatchProcessor",
    "WeightAdapter",
    "check_device",
    "check_sandwich_norms",
    "settings_of",
    "with_flags",
]
