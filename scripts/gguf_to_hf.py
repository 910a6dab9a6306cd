"""A model's folder, as transformers and vLLM load it, from a GGUF file of SmolLM2.

    PYTHONPATH=<where gguf is> python scripts/gguf_to_hf.py FILE FOLDER

transformers reads GGUF, too. But it doesn't know the pre-tokenizer `smollm`, which splits digits
first, and gives other token ids. So the tokenizer is put together here, from the file's vocabulary.

Weights are stored in bfloat16, as the model was published: half the size of float32. Its rounding
(1 part in 512) is below that of the file's own 4 and 8 bits.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

_PARTS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Of a layer: its tensors' names in GGUF, and in Llama's checkpoints."""
_CONTROL: Final = 3
"""The type of tokens such as `<|im_start|>`."""
_ROLES: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Of special tokens: in transformers, and in GGUF."""


def convert(file: Path, folder: Path) -> None:
    """Write `folder`, which must not exist yet. A ValueError says what isn't as in SmolLM2."""
    from gguf import GGUFReader  # type: ignore[import-not-found]

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"], fields["tokenizer.ggml.pre"]
    if kind != ("llama", "smollm"):
        raise ValueError(f"{file}: {kind[0]} with the pre-tokenizer {kind[1]}, not SmolLM2")
    folder.mkdir(parents=True)
    _write_weights(reader.tensors, fields, folder)
    _write_tokenizer(fields, folder)
    ids = {f"{ours}_token_id": fields[f"tokenizer.ggml.{_ROLES[ours]}_token_id"] for ours in _ROLES}
    del ids["unk_token_id"]
    _write(folder / "generation_config.json", ids)
    _write(folder / "config.json", _config(fields) | ids)


def _write_weights(tensors: Any, fields: dict[str, Any], folder: Path) -> None:
    import torch
    from gguf.quants import dequantize  # type: ignore[import-not-found]
    from safetensors.torch import save_file

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        _, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        if part in heads:
            # GGUF has the two halves of each head in turn, row by row: [heads, rows, halves, in].
            split = weight.view(heads[part], -1, 2, weight.shape[1])
            weight = split.transpose(1, 2).reshape(weight.shape)
        weights[_name(tensor.name)] = weight.bfloat16()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # created readable by its owner only


def _name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.weight"


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges: Any = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, of in types if of == _CONTROL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in _ROLES.items()
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write(folder / "tokenizer_config.json", config | special)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
