"""Sizes of a decoder-only transformer that its cost depends on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from batchllm_operator.errors import ModelError

_GATED_DENSE: Final = frozenset(
    {"gemma", "gemma2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"}
)
"""Values of model_type with the layers that `ModelShape` describes."""
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP of three matrices."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    num_parameters: int
    """All parameters in memory: embeddings, head, norms and biases included."""
    bytes_per_weight: float = 2.0
    bytes_per_kv_element: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        """2 * n_bytes * n_layers * n_kvheads * d_head (paper, Sec. 2)."""
        elements = self.num_layers * self.num_kv_heads * self.head_size
        return 2 * self.bytes_per_kv_element * elements

    @property
    def num_layer_weights(self) -> int:
        """Weights of one layer's matrices: Q and O, K and V, and the three of the MLP."""
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def weight_bytes(self) -> float:
        """Memory of the weights."""
        return self.num_parameters * self.bytes_per_weight

    @property
    def step_weight_bytes(self) -> float:
        """Weights that an engine step reads: all layers and the head, not the embeddings."""
        head = self.vocab_size * self.hidden_size
        return (self.num_layers * self.num_layer_weights + head) * self.bytes_per_weight

    @property
    def flop_per_token(self) -> int:
        """FLOP of all layers' matrices for one token: 2 per weight."""
        return 2 * self.num_layers * self.num_layer_weights

    @property
    def flop_per_sampled_token(self) -> int:
        """FLOP of the head for one sampled token."""
        return 2 * self.vocab_size * self.hidden_size

    @property
    def flop_per_pair(self) -> int:
        """FLOP of attention for one pair of tokens: Q*K and P*V."""
        return 4 * self.num_layers * self.num_heads * self.head_size


def model_shape(
    config: Mapping[str, Any],
    name: str,
    *,
    bytes_per_weight: float | None = None,
    bytes_per_kv_element: float = 2.0,
) -> ModelShape:
    """The shape that a `config.json` in Hugging Face's format describes.

    Args:
        name: of the model, in the shape and in errors.
        bytes_per_weight: unset: 2, or what the file's quantization says.
        bytes_per_kv_element: of the KV cache.

    Raises `ModelError`: the file lacks a size, or describes another kind of model (experts, other
    layers, a quantization that isn't known).
    """
    model_type = config.get("model_type")
    if any(config.get(field) for field in _EXPERTS) or model_type not in _GATED_DENSE:
        raise ModelError(f"model {name}: models of type {model_type!r} can't be estimated yet")

    def size(field: str, default: int | None = None) -> int:
        value = config.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"model {name}: its config.json has no {field}")
        return value

    layers, hidden = size("num_hidden_layers"), size("hidden_size")
    heads = size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    head_size = size("head_dim", hidden // heads)
    intermediate, vocab = size("intermediate_size"), size("vocab_size")
    weights = 2 * hidden * head_size * (heads + kv_heads) + 3 * hidden * intermediate
    has_bias = config.get("attention_bias") or model_type == "qwen2"
    biases = head_size * (heads + 2 * kv_heads) if has_bias else 0
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=intermediate,
        vocab_size=vocab,
        num_parameters=layers * (weights + biases + 2 * hidden) + hidden + embeddings,
        bytes_per_weight=bytes_per_weight or _stored_bytes_per_weight(config, name),
        bytes_per_kv_element=bytes_per_kv_element,
    )


def _stored_bytes_per_weight(config: Mapping[str, Any], name: str) -> float:
    """2, because engines load 32-bit weights as 16-bit ones, or by the quantization."""
    quantization = config.get("quantization_config")
    if not quantization:
        return 2.0
    bits, method = quantization.get("bits"), quantization.get("quant_method")
    if isinstance(bits, int) and 0 < bits <= 16:
        return bits / 8
    if method == "fp8":
        return 1.0
    raise ModelError(f"model {name}: quantization {method!r} can't be estimated yet")


MODEL_SHAPES: Final[Mapping[str, ModelShape]] = {
    "Mistral-7B": ModelShape("Mistral-7B", 32, 4096, 32, 8, 128, 14336, 32000, 7_241_732_096),
    "Llama-3-8B": ModelShape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, 8_030_261_248),
    "Qwen2-7B": ModelShape("Qwen2-7B", 28, 3584, 28, 4, 128, 18944, 152064, 7_615_616_512),
}
"""Shapes by name, in 16 bits, from the models' published configs."""
