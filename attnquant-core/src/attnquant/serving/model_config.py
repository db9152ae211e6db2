"""The fields that AttnQuant adds to a model's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from attnquant.plugins import installed_plugins
from attnquant.serving.compile_cache import check_compile_cache
from attnquant.serving.kv_cache import reserve_whole_prompts
from attnquant.serving.projections import ProjectionMaker
from attnquant.settings import Settings, resolve_settings
from attnquant.theta.bundle import BundleInfo, parse_block
from attnquant.theta.checkpoint import BUNDLE_KEY
from attnquant.theta.layout import ThetaLayout

if TYPE_CHECKING:
    from max.dtype import DType
    from max.graph import DeviceRef
    from max.pipelines.lib import KVCacheConfig, PipelineConfig


@dataclass(kw_only=True)
class AttnQuantConfigMixin:
    """Adds the decomposition's settings to one of MAX's model configs.

    Mixed in before it, so that the cache layout is the plugin's.
    """

    ARCHITECTURE: ClassVar[str]
    """The architecture whose plugin is asked."""

    lora_rank: int = 0
    """r, the rank of the low-rank terms; 0 at passthrough."""

    tie_families: str = "all"
    """Which families are decomposed: ``all`` or ``attn``."""

    shared_blocks: int = 0
    """G, the number of bands."""

    tied_projections: tuple[str, ...] = ()
    """The families that are decomposed, by name."""

    formulation: str = "gemm"
    """How projections are computed."""

    layout: ThetaLayout | None = field(default=None, repr=False)
    """Which theta tensors there are; known once the weights are."""

    storage: DType | None = None
    """What projections, embedding and head are stored in, where it is not the dtype
    that is computed in; known once the weights are."""

    @classmethod
    def construct_kv_params(
        cls,
        huggingface_config: Any,
        pipeline_config: PipelineConfig,
        devices: list[DeviceRef],
        kv_cache_config: KVCacheConfig,
        cache_dtype: DType,
        *,
        allow_kv_head_replication: bool = False,
    ) -> Any:
        """Return the cache layout that the plugin's hook gives, sized for any prompt.

        MAX's configs replicate heads over devices; here there is one device.
        """
        del allow_kv_head_replication
        # MAX plans memory before it loads any graph, of which the model's is not the
        # first: the last moment to remove what it would fail on.
        check_compile_cache()
        return reserve_whole_prompts(
            installed_plugins()
            .find(cls.ARCHITECTURE)
            .kv_params(
                huggingface_config=huggingface_config,
                pipeline_config=pipeline_config,
                devices=devices,
                kv_cache_config=kv_cache_config,
                cache_dtype=cache_dtype,
            )
        )

    def apply_settings(self, settings: Settings) -> None:
        """Take over resolved settings."""
        self.lora_rank = settings.lora_rank
        self.tie_families = settings.tie_families
        self.shared_blocks = settings.shared_blocks
        self.tied_projections = settings.tied_projections
        self.formulation = settings.formulation

    @property
    def theta_layout(self) -> ThetaLayout:
        """The layout, which the weight adapter found.

        Raises:
            RuntimeError: If weights have not been adapted yet.
        """
        if self.layout is None:
            msg = "the layout is known only after the weights have been adapted"
            raise RuntimeError(msg)
        return self.layout

    @property
    def storage_dtype(self) -> DType:
        """The dtype of projections, embedding and head."""
        host: Any = self
        return self.storage or host.dtype

    def projection_maker(self) -> ProjectionMaker:
        """Return what makes the linears of this model's layers."""
        # MAX's config that this is mixed into supplies dtype and devices.
        host: Any = self
        return ProjectionMaker(
            self.theta_layout,
            self.formulation,
            host.dtype,
            host.devices[0],
            self.storage_dtype,
        )


def bundle_of(huggingface_config: Any) -> BundleInfo | None:
    """Return a bundle's block out of transformers' config; None for a raw checkpoint.

    Raises:
        BundleError: If there is a block that cannot be read.
    """
    block = getattr(huggingface_config, BUNDLE_KEY, None)
    return None if block is None else parse_block(block)


def settings_of(huggingface_config: Any, num_layers: int) -> Settings:
    """Return the settings that a model is served with.

    Raises:
        SettingError: If the environment is out of range or contradicts the bundle.
    """
    return resolve_settings(num_layers, bundle_of(huggingface_config))
