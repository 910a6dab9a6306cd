"""The demo's model: Qwen2 in miniature with random weights and a real tokenizer.

    python scripts/demo_model.py DIR

Its texts are nonsense, but everything else is as with a real model: folder, tokenizer, chat
template, loading code. Heavy libraries are imported when used.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

_SEED: Final = 0
_VOCAB_SIZE: Final = 4_096
_HIDDEN_SIZE: Final = 128
_NUM_LAYERS: Final = 2
_NUM_HEADS: Final = 4
_NUM_KV_HEADS: Final = 2
_MAX_POSITIONS: Final = 4_096

_END_OF_TEXT: Final = "<|endoftext|>"
_MESSAGE_START: Final = "<|im_start|>"
_MESSAGE_END: Final = "<|im_end|>"
_SPECIAL_TOKENS: Final = (_END_OF_TEXT, _MESSAGE_START, _MESSAGE_END)

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Spreads of the weights, chosen so that outputs depend on the whole prompt, and the best two logits
# are far apart compared to float32 noise.
_GAINS: Final = {
    **dict.fromkeys(("q_proj", "k_proj"), 1.2),  # attention concentrates on few positions
    **dict.fromkeys(("o_proj", "down_proj"), 3.0),  # layers outweigh the last token's embedding
}
_NORM_SPREAD: Final = 0.5  # of the log of each token's output norm: few tokens compete
_END_NORM: Final = 5.0  # the end of a message is sampled now and then


def build_demo_model(folder: Path, *, documents: Sequence[str] | None = None) -> None:
    """Write a tiny Qwen2 model and its tokenizer into `folder`; transformers and vLLM load it.

    Weights are float32 and random with a fixed seed; the byte-level BPE tokenizer is trained on
    `documents` (default: `demo_documents()`). Equal documents give equal bytes. Files are written
    elsewhere and moved in at the end, `config.json` last, so that a folder with a `config.json` is
    complete; an older model in the folder is replaced.
    """
    if documents is None:
        from demo_table import demo_documents

        documents = [document.text for document in demo_documents()]
    from transformers.utils import logging

    tokenizer = _train_tokenizer(documents)
    model = _random_model(tokenizer)

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        tokenizer.save_pretrained(unfinished)
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        model.save_pretrained(unfinished)
        if shown:
            logging.enable_progress_bar()
        (unfinished / "model.safetensors").chmod(0o644)  # created readable by its owner only
        folder.mkdir(exist_ok=True)
        for file in sorted(unfinished.iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _train_tokenizer(documents: Sequence[str]) -> Qwen2Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    # Loading by model type gives a Qwen2Tokenizer, which splits text in its own way; training with
    # the same splitting keeps tokenizer.json correct for readers of that file alone.
    untrained = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = untrained.normalizer
    tokenizer.pre_tokenizer = untrained.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    trained: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    merges: Any = [tuple(merge) for merge in trained["merges"]]  # pairs, despite the annotation
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=merges,
        unk_token=_END_OF_TEXT,
        eos_token=_MESSAGE_END,
        pad_token=_END_OF_TEXT,
        additional_special_tokens=[_MESSAGE_START],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=_MAX_POSITIONS,
    )


def _random_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=_HIDDEN_SIZE,
        intermediate_size=4 * _HIDDEN_SIZE,
        num_hidden_layers=_NUM_LAYERS,
        num_attention_heads=_NUM_HEADS,
        num_key_value_heads=_NUM_KV_HEADS,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(_SEED)
        model: Qwen2ForCausalLM = Qwen2ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" in name:
                weight.fill_(1.0)
            else:
                spread = _GAINS.get(name.split(".")[-2], 1.0) / math.sqrt(weight.shape[-1])
                if name.endswith("bias"):
                    spread = 0.1
                elif "embed_tokens" in name:
                    spread = 1.0
                weight.normal_(0.0, spread, generator=generator)
        # Each token's row of [vocab, hidden] has a random norm. Ids without a token, and special
        # tokens other than the end of a message, get zero, so that they are never generated.
        weight = model.lm_head.weight
        # math.exp, because torch's exp was less exact for the first element of each thread.
        normal = weight.new_empty(weight.shape[0]).normal_(generator=generator).tolist()
        norms = weight.new_tensor([math.exp(_NORM_SPREAD * value) for value in normal])
        norms[len(tokenizer) :] = 0.0
        norms[tokenizer.all_special_ids] = 0.0
        norms[tokenizer.eos_token_id] = _END_NORM
        weight.mul_(norms[:, None])
    return model


if __name__ == "__main__":
    build_demo_model(Path(sys.argv[1]))
    print(f"demo model: {sys.argv[1]}")
