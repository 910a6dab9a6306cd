"""Models with random weights of a size that tells tokens apart, the same ones in every process.

vLLM's own dummy weights are so small that all tokens tie.
"""

import zlib
from typing import Any, Final

LOAD_FORMAT: Final = "batchllm_drawn"
"""For vLLM's argument `load_format`, once `register_loader` has been called."""
_WEIGHTS_STD: Final = 0.02


def register_loader() -> None:
    """Make vLLM know the load format that has weights of `draw_weights`."""
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

    @register_model_loader(LOAD_FORMAT)
    class Loader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            draw_weights(model)


def draw_weights(model: Any) -> None:
    """Matrices from a normal distribution, the same ones each time; norms of 1, biases of 0.

    Args:
        model: a torch module, which is changed.
    """
    import torch

    for name, weights in model.named_parameters():
        if weights.dim() > 1:
            generator = torch.Generator(weights.device).manual_seed(zlib.crc32(name.encode()))
            weights.data.normal_(0.0, _WEIGHTS_STD, generator=generator)
        else:
            weights.data.fill_(1.0 if "norm" in name else 0.0)
