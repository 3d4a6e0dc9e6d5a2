"""Write a checkpoint as GGUF, quantize and compare: `python -m models.export CHECKPOINT OUT.gguf --type q4_0`."""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from tokenizers import Tokenizer

from models import trainer
from models.generator import END_OF_TEXT, IM_END, held_back, render_chat
from models.network import MoE, Network
from models.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase

FILE_TYPES = {
    "q8_0": (Q.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Q.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def tensors(net: Network) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's names with float32 arrays; rows run over the input dimension, experts come first."""
    s = net.shape

    def array(t: object) -> np.ndarray:
        return np.ascontiguousarray(t.detach().float().cpu().numpy())  # type: ignore[attr-defined]

    yield "token_embd.weight", array(net.embed.weight)
    yield "output_norm.weight", array(net.norm.weight)
    n_q, n_kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    for i, block in enumerate(net.blocks):
        attn, ffn = block.attn, block.ffn
        q, k, v = attn.qkv.weight.split((n_q, n_kv, n_kv))
        named = {
            "attn_norm": block.attn_norm.weight,
            "ffn_norm": block.ffn_norm.weight,
            "attn_q": q,
            "attn_k": k,
            "attn_v": v,
            "attn_output": attn.out.weight,
            "attn_q_norm": attn.q_norm.weight,
            "attn_k_norm": attn.k_norm.weight,
        }
        if isinstance(ffn, MoE):
            gate, up = ffn.gate_up.transpose(1, 2).split(s.n_ff, dim=1)  # (E, n_ff, n_embd) each
            named |= {
                "ffn_gate_inp": ffn.router.weight,
                "ffn_gate_exps": gate,
                "ffn_up_exps": up,
                "ffn_down_exps": ffn.down.transpose(1, 2),
            }
        else:
            gate, up = ffn.gate_up.weight.split(s.n_ff)
            named |= {"ffn_gate": gate, "ffn_up": up, "ffn_down": ffn.down.weight}
        for name, value in named.items():
            yield f"blk.{i}.{name}.weight", array(value)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Vocabulary, merges, special tokens and the chat template."""
    vocab = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token, _ in vocab]
    )
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    writer.add_eos_token_id(tokenizer.token_to_id(IM_END))
    writer.add_pad_token_id(end_of_text)
    writer.add_bos_token_id(end_of_text)  # never added; without it llama.cpp assumes GPT-2's
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_f32(net: Network, tokenizer: Tokenizer, path: Path, name: str) -> None:
    """The network as it was trained, every tensor in float32."""
    s = net.shape
    writer = gguf.GGUFWriter(path, "qwen3moe" if s.n_expert else "qwen3")
    writer.add_name(name)
    writer.add_description("Toy model trained on synthetic text (moeedge, models/train.py): for tests and first steps.")
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(s.n_ctx)
    writer.add_embedding_length(s.n_embd)
    writer.add_block_count(s.n_layer)
    writer.add_feed_forward_length(s.n_ff * max(1, s.n_expert_used))
    writer.add_head_count(s.n_head)
    writer.add_head_count_kv(s.n_head_kv)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_freq_base(s.rope_theta)
    writer.add_layer_norm_rms_eps(s.rms_eps)
    writer.add_vocab_size(s.n_vocab)
    if s.n_expert:
        writer.add_expert_count(s.n_expert)
        writer.add_expert_used_count(s.n_expert_used)
        writer.add_expert_feed_forward_length(s.n_ff)
    add_tokenizer(writer, tokenizer)
    for tensor, array in tensors(net):
        writer.add_tensor(tensor, array, raw_dtype=Q.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, out: Path, kind: str) -> None:
    """Write the float32 GGUF `source` as `out` with llama.cpp's quantizer, other matrices than experts in Q8_0.

    kind: type of the experts, or of all matrices of a dense model. Norms and routers stay float32: llama.cpp says of no
    router that it may be quantized, and routing must not drift.
    """
    expert_type, file_type = FILE_TYPES[kind]
    overrides = (llama_cpp.llama_model_tensor_override * 3)(
        (rb"ffn_(gate|up|down)_exps", int(expert_type)),
        (rb"attn_(q|k|v|output)\.weight", int(Q.Q8_0)),
        (None, 0),
    )
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.token_embedding_type = params.output_tensor_type = int(Q.Q8_0)
    params.tt_overrides = overrides
    library.start()  # llama.cpp would name every tensor
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params))
    if code:
        raise OSError(f"llama.cpp's quantizer returned {code} for {source.name}")


def export(net: Network, tokenizer: Tokenizer, path: Path, kind: str, name: str) -> None:
    """Write `net` to `path` atomically. `kind`: type of the experts (or of all matrices of a dense model)."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        f32, part = Path(folder) / "f32.gguf", Path(folder) / "part.gguf"
        write_f32(net, tokenizer, f32, name)
        if kind != "f32":
            quantize(f32, part, kind)
        (f32 if kind == "f32" else part).replace(path)


@dataclass(frozen=True)
class Agreement:
    """Over all tokens of some held-back chats."""

    tokens: int
    relative_error: float  # root mean square of the difference over that of the logits
    greedy: float  # share of tokens with the same most likely successor

    def __str__(self) -> str:
        return f"{self.tokens} tokens: relative error {self.relative_error:.4f}, same greedy choice {self.greedy:.4f}"


def compare(net: Network, path: Path, n_chats: int = 20) -> Agreement:
    """Read `n_chats` chats with both; quantisation shows as error, a wrong layout as nonsense."""
    wanted, got = [], []
    with Model.load(path, device="none") as model, Context(model, n_ctx=1024) as context, torch.no_grad():
        for chat in held_back(n_chats):
            ids = model.tokenize(render_chat(chat), add_special=False)
            context.clear()
            got.append(context.decode(ids, phase=Phase.PREFILL, logits="all").copy())
            wanted.append(net.logits(net(torch.tensor([ids]))[0])[0].numpy())
    a, b = np.concatenate(wanted), np.concatenate(got)
    error = float(np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2)))
    return Agreement(len(a), error, float((a.argmax(-1) == b.argmax(-1)).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=("f32", *sorted(FILE_TYPES)), default="q4_0", help="of the experts' weights")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: next to the checkpoint")
    parser.add_argument("--name", default="moeedge toy")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer or args.checkpoint.with_name("tokenizer.json")))
    net = trainer.load(args.checkpoint)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    export(net, tokenizer, args.out, args.type, args.name)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB; against the checkpoint, {compare(net, args.out)}")


if __name__ == "__main__":
    main()
