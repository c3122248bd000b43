"""Server arguments that are refused for one reason each, and what the refusals say."""

import re

DSA_FLAGS = ("--dsa-prefill-backend", "--dsa-decode-backend")
TIER = "--enable-hierarchical-cache"
EAGLE = ("--speculative-algorithm", "EAGLE")
STEPS = ("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4")
#: Words of the tables that stand for several arguments.
SHORT = {
    "TIER": (TIER,),
    "EAGLE": EAGLE,
    "STEPS": STEPS,
    "DCP": ("--tp-size", "4", "--dcp-size", "2"),
    "OFFLOAD": ("--disaggregation-decode-enable-offload-kvcache", "--hicache-storage-backend", "file"),
    "CHAIN": ('{"num_nextn_predict_layers":2}',),
    # Queries that are scaled by position.
    "SHORT_LISTS": ('{"index_topk":512}',),
    "SCALED": ('{"llama_4_scaling":{"original_max_position_embeddings":8192,"beta":0.1}}',),
}


def pair(prefill, decode):
    return (DSA_FLAGS[0], prefill, DSA_FLAGS[1], decode)


#: Model, device, layout and arguments that are refused for one reason; below them the start of the message.
DENSE = r"""
mla cuda fp8 --attention-backend flashinfer
  --attention-backend flashinfer would .* of prefill .*; leave it out, or .*: kvpool_mla, flashmla, triton$
mla cpu fp8 --attention-backend flashinfer
  --attention-backend flashinfer would cast .* of prefill .*: kvpool_mla, torch_native$
mla cuda fp8 --prefill-attention-backend flashmla
  --prefill-attention-backend flashmla would cast .* of prefill .*one of: kvpool_mla, triton$
mla cuda fp8 --decode-attention-backend fa3
  --decode-attention-backend fa3 would cast .* of decode .*one of: kvpool_mla, flashmla, triton$
mla cuda fp8 --prefill-attention-backend kvpool_mla --decode-attention-backend flashinfer
  --decode-attention-backend flashinfer would cast .* of decode .*one of: kvpool_mla, flashmla, triton$
mla cuda fp4 --attention-backend flashmla
  --attention-backend flashmla cannot read rows of --kv-cache-layout fp4; leave it out, or use kvpool_mla$
mla cpu fp8_block_scale --attention-backend triton
  --attention-backend triton cannot read rows of --kv-cache-layout fp8_block_scale; .*or use kvpool_mla$
mla cuda fp8_block_scale --prefill-attention-backend trtllm_mla
  --prefill-attention-backend trtllm_mla cannot read rows of --kv-cache-layout fp8_block_scale; .*kvpool_mla$
mla cuda bf16 --attention-backend fa3 --kv-cache-arrangement page_major
  --attention-backend fa3 cannot read .* page_major: .*a slot times a stride.*kvpool_mla$
mla cpu bf16 --decode-attention-backend torch_native --kv-cache-arrangement page_major
  --decode-attention-backend torch_native cannot read rows of --kv-cache-arrangement page_major: .*kvpool_mla$
mla cuda bf16 --attention-backend fa4 --kv-cache-arrangement token_major
  --attention-backend fa4 cannot read rows of --kv-cache-arrangement token_major: its kernels are not known
mla cpu bf16 --prefill-attention-backend intel_amx --kv-cache-arrangement token_major
  --prefill-attention-backend intel_amx cannot read rows of --kv-cache-arrangement token_major: .*kvpool_mla
mla cpu bf16 --kv-cache-arrangement token_major --disaggregation-mode prefill
  --disaggregation-mode prefill does not work with --kv-cache-arrangement token_major: .*one of the two
mla cuda bf16 --attention-backend kvpool_mla --enable-mis
  --enable-mis does not work with .*masks between the items
mla cuda fp4 --cuda-graph-backend-prefill full
  --cuda-graph-backend-prefill full does not work with .*use breakable
mla cuda fp4 --enable-torch-compile
  --enable-torch-compile does not work with attention backend kvpool_mla
mla cuda fp4 --dtype float32
  --dtype float32 does not work .* on CUDA.*use --dtype bfloat16 or
mla cuda fp4 --page-size 0
  --page-size 0 is not a valid number of tokens
mla cuda fp4 EAGLE STEPS --speculative-eagle-topk 2
  --speculative-eagle-topk 2 does not .*trees need a mask.*-topk 1, or use .*bf16 and leave out --att
mla cuda bf16 --attention-backend kvpool_mla EAGLE STEPS --speculative-eagle-topk 4
  --speculative-eagle-topk 4 does not .*trees need a mask.*--speculative-eagle-topk 1$
mla cuda fp4 EAGLE STEPS --speculative-eagle-topk 0
  --speculative-eagle-topk 0 does not work.*-topk 1, or use
mla cuda fp4 --speculative-algorithm NGRAM
  --speculative-algorithm NGRAM does not work .*one of: EAGLE, EAGLE3, NEXTN, or use
mla cuda fp8 EAGLE --attention-backend flashinfer
  --attention-backend flashinfer would cast .* leave it out, or use one of: kvpool_mla, triton$
mla cuda fp8 EAGLE --decode-attention-backend flashmla
  --speculative-algorithm EAGLE needs .* prefill uses kvpool_mla and decode uses flashmla; use
mla cuda bf16 EAGLE --prefill-attention-backend triton --decode-attention-backend kvpool_mla
  --speculative-algorithm EAGLE needs .* prefill uses triton and decode uses kvpool_mla; use
mla cuda bf16 EAGLE --attention-backend flashinfer --speculative-draft-attention-backend kvpool_mla
  --speculative-draft-attention-backend kvpool_mla is not used beside .* flashinfer of the target;
mla cuda fp8 --decode-attention-backend flashmla --enable-deterministic-inference
  --enable-deterministic-inference does not .* kvpool_mla for prefill and flashmla for decode, .* alone$
mla cuda fp4 EAGLE --enable-deterministic-inference
  --enable-deterministic-inference does not work with attention backend kvpool_mla: the queries of a verif
mla cuda fp4 EAGLE --speculative-draft-window-size 512
  --speculative-draft-window-size 512 does not work with attention backend kvpool_mla:
mla cuda fp4 EAGLE --enable-multi-layer-eagle
  --enable-multi-layer-eagle does not work with attention backend kvpool_mla:
"""
HOST_TIER = r"""
mla cuda fp4 --kv-host-sharing rank
  --kv-host-sharing rank .* does nothing without --enable-hierarchical-cache
mla cpu fp4 --kv-error-sample 512
  --kv-error-sample 512 .* does nothing without --enable-metrics; add that, or leave it out$
mla cpu fp4 --kv-canary log
  --kv-canary log does not work with --kv-cache-layout on a CPU, .*; leave it out$
mla cuda fp4 TIER --kv-canary log
  --kv-canary log does not work with .* or with a host tier, .*; leave it out$
mla cuda bf16 --kv-canary raise --disaggregation-mode prefill
  --kv-canary raise does not .*, disaggregation, .*; leave it out$
mla cuda bf16 --attention-backend triton EAGLE STEPS --speculative-eagle-topk 4 --kv-canary raise
  --kv-canary raise does not .* or trees of drafts: .*; leave it out$
mla cuda fp4 TIER --kv-host-sharing node --pp-size 2 --tp-size 2
  --kv-host-sharing node does not work with --pp-size 2: .*; leave out --kv-host-sharing, or give rank$
mla cuda fp4 TIER --kv-host-layout fp8_block_scale
  --kv-host-layout fp8_block_scale does not work: its rows have 656 bytes
mla cuda fp4 TIER --kv-host-engine cpu
  --kv-host-engine cpu does not work on cuda.*use one of: staged, copy_engine, kernel$
mla cpu fp4 TIER --kv-host-engine staged
  --kv-host-engine staged does not work on cpu; leave it out, or use cpu$
mla cuda bf16 TIER --kv-host-engine copy_engine --kv-host-layout fp4
  --kv-host-engine copy_engine copies rows as they are, and --kv-host-layout fp4 changes them; use
mla cuda fp4 TIER --hicache-mem-layout layer_first
  --hicache-mem-layout layer_first does not work with .*layout fp4.*use one of: page_first, page_first_direct$
mla cpu fp4 TIER --hicache-io-backend kernel_ascend
  --hicache-io-backend kernel_ascend does not work with --kv-cache-layout fp4.*use one of: kernel, direct$
mla cuda fp4 TIER --chunked-prefill-size 1000
  --chunked-prefill-size gives a rank 1000 tokens, .* pages of 64 .*; use --chunked-prefill-size 960$
mla cpu fp4 --page-size 128 --chunked-prefill-size 100
  --chunked-prefill-size gives a rank 100 tokens, .* pages of 128 .*; use --chunked-prefill-size 128$
mla cuda bf16 TIER --chunked-prefill-size 1000 --tp-size 4 --attn-dp-size 2
  --chunked-prefill-size gives a rank 500 tokens, .* pages of 64 .*; use --chunked-prefill-size 896$
kda cuda fp4 TIER --chunked-prefill-size 1000 --mamba-track-interval 96
  --chunked-prefill-size gives a rank 1000 tokens, .* pages of 32 .*; use --chunked-prefill-size 992$
dsa cuda fp4 --chunked-prefill-size 96
  --chunked-prefill-size gives a rank 96 tokens, .* pages of 64 .*; use --chunked-prefill-size 64$
mla cuda fp4 --hicache-storage-backend file
  --hicache-storage-backend file does nothing without --enable-hierarchical-cache
kda cuda fp4 TIER --kv-host-sharing node --tp-size 2
  --kv-host-sharing node does not work with a model with linear attention
"""
#: The same for features: their arguments come first, and the message begins with them.
FEATURES = """
mla cuda fp4 --enable-unified-memory
mla cpu fp4 --enable-unified-cache-external-linker
mla cuda fp4 --enable-lmcache
mla cpu fp8_block_scale --enable-flexkv
mla cpu fp8_block_scale --radix-cache-backend other
mla cpu fp4 --use-ray
mla cpu fp4 --disaggregation-decode-host-receive-threshold 0.5 --disaggregation-mode decode
mla cpu fp4 --disaggregation-decode-retraction-backup host_pool --disaggregation-mode decode
dsa cuda fp4 --enable-hisparse --disable-radix-cache
dsa cuda fp4 --enable-torch-compile
"""
DCP = r"""
mla cpu fp4 DCP
  --dcp-size 2 does not work with --kv-cache-layout fp4 on a CPU: SGLang merges .* GPUs; leave it out
dsa cuda fp8 DCP DSA tilelang tilelang
  --dcp-size 2 does not .* fp8 and DeepseekV32ForCausalLM: SGLang stores such rows for tilelang and .*; leave
dsa-kpool cuda fp4 DCP
  --dcp-size 2 does not .* fp4 and DeepseekV32ForCausalLM: a pooled index key has tokens of several ranks; le
dsa-sinks cuda fp4 DCP
  DeepseekV32.* sinks, .* fp4 with --dcp-size 2; use --kv-cache-layout bf16 and leave out --dcp-size$
dsa-sinks cuda bf16 DCP
  DeepseekV32.* sinks, .* bf16 with --dcp-size 2; leave out --dcp-size$
dsa cuda bf16 DCP DSA flashmla_sparse fa3
  --dsa-decode-backend fa3 cannot read rows of .* bf16 with --dcp-size 2; leave it out, and both phases use k
dsa cuda fp8_block_scale DCP --dsa-prefill-backend flashmla_kv
  --dsa-prefill-backend flashmla_kv cannot read rows of .* fp8_block_scale with --dcp-size 2; leave it out
dsa cuda bf16 DCP --enable-torch-compile
  --enable-torch-compile does not .* bf16 with --dcp-size 2: .*fp8_block_scale and leave out --dcp-size, .*or
dsa cuda fp4 DCP EAGLE --json-model-override-args CHAIN
  --dcp-size 2 .*: chains of several layers for multi-token prediction have not been tested there; leave it
dsa cuda fp4 DCP --dcp-replicate-q-proj --dcp-comm-backend a2a
  --dcp-replicate-q-proj does not work with .* fp4 with --dcp-size 2: .* after it has sized the pool; leave it
dsa cuda fp4 DCP EAGLE --enable-multi-layer-eagle
  --dcp-size 2 .* fp4 and --enable-multi-layer-eagle: .*; leave out one of them$
dsa cuda fp4 DCP --enable-two-batch-overlap --moe-a2a-backend deepep
  --dcp-size 2 does not work with --kv-cache-layout fp4 and --enable-two-batch-overlap: .*; leave out one of
kda cuda bf16 DCP TIER
  --dcp-size 2 does not .* bf16 and KimiLinearForCausalLM: SGLang's host pool, without .*; leave it out
kda cuda fp4 DCP TIER --hicache-storage-backend file
  --dcp-size 2 does not .* fp4 and KimiLinearForCausalLM: moving its states .*; leave it out
kda cuda fp4 DCP --disable-overlap-schedule
  --dcp-size 2 does not .* fp4 and KimiLinearForCausalLM: .* pages of one token, .*; leave it out
kda cuda fp4 DCP --pp-size 2
  --dcp-size 2 does not .* fp4 and KimiLinearForCausalLM: stages and groups of ranks .*; leave it out
kda cuda fp4 DCP --disaggregation-mode decode
  --dcp-size 2 does not .* fp4 and KimiLinearForCausalLM: moving its states .*; leave it out
lightning cuda fp4 DCP
  --dcp-size 2 does not .* fp4 and BailingMoeV2_5ForCausalLM: SGLang does not gather the rows .*; leave it out
mla cuda fp4 DCP --json-model-override-args SCALED
  --dcp-size 2 .*it does not merge results of ranks; leave it out
mla cuda fp4 DCP TIER --hicache-storage-backend nixl
  --dcp-size 2 .* fp4 and --hicache-storage-backend nixl: .*; leave out one of them$
mtp1 cuda bf16 DCP TIER EAGLE
  --dcp-size 2 .*: SGLang's host pool, without --kv-host-engine, divides a draft's rows .*; leave it out$
dsa cuda fp4 DCP --json-model-override-args SHORT_LISTS
  --dcp-size 2 .*: SGLang's operator for prefills over stored rows selects 2048 .*; leave it out$
mla cuda fp4 DCP TIER --kv-host-sharing node
  --kv-host-sharing node does not work with --dcp-size 2: .*; leave out --kv-host-sharing, or give rank$
mla cuda bf16 DCP --attention-backend fa3
  --dcp-size 2 with --kv-cache-layout bf16 needs .* and fa3 has
mla cuda fp4 DCP OFFLOAD --disaggregation-mode decode
  --dcp-size 2 .* fp4 and --disaggregation-decode-enable-offload-kvcache: .*; leave out one of them$
mla cuda fp4 DCP --kv-canary log
  --kv-canary log does not .*, --dcp-size or .*; leave it out$
mla cuda fp4 DCP --enable-two-batch-overlap --moe-a2a-backend deepep
  --dcp-size 2 does not work with --kv-cache-layout fp4 and --enable-two-batch-overlap: .*; leave out one of
"""
#: The same for features that do not go with --dcp-size.
DCP_CASES = """
mtp1 cuda fp8 --speculative-adaptive
mla cuda bf16 --enable-deterministic-inference
dsa cuda fp4 --disaggregation-mode prefill
dsa cuda fp4 --speculative-algorithm EAGLE3
dsa cuda fp4 --chunked-prefill-size -1
dsa cuda fp4 --pp-size 2
dsa cuda bf16 --attn-dp-size 2
"""
SPARSE = r"""
dsa-glm cuda fp4 --enable-prefill-cp --tp-size 2 --attn-cp-size 2 --cp-strategy zigzag
  --cp-strategy zigzag does not work with sparse attention, .*; use --cp-strategy interleave$
dsa cuda fp8
  .*prefill flashmla_kv cannot read rows of KV cache layout fp8; use --kv-cache-layout fp8_block_scale,
dsa cuda fp8 DSA flashmla_sparse flashmla_kv
  .*prefill flashmla_sparse cannot read
dsa cuda fp8 DSA flashmla_sparse trtllm
  .*prefill flashmla_sparse cannot read
dsa cuda fp8 --kv-cache-dtype fp8_e4m3
  .*prefill flashmla_kv cannot read
dsa cuda bf16 DSA flashmla_kv flashmla_kv
  .*would quantise the whole pool
dsa cuda fp8_block_scale DSA flashmla_sparse flashmla_sparse
  .*decode flashmla_sparse cannot read
dsa cuda fp8_block_scale DSA trtllm trtllm
  .*prefill trtllm cannot read
dsa cuda fp8_block_scale DSA flashmla_kv flashmla_auto
  .*flashmla_auto is for prefill only
dsa cuda fp8_block_scale DSA flashmla_kv aiter
  --dsa-decode-backend aiter is not for NVIDIA GPUs; use --dsa-prefill-backend
dsa cuda fp8_block_scale DSA flashmla_sparse_q8 flashmla_kv --enable-mixed-chunk
  .*in EXTEND batches only, and this one is MIXED; leave out .*--enable-mixed-chunk
dsa cuda fp4 DSA flashmla_kv flashmla_kv
  .*--dsa-decode-backend flashmla_kv cannot read .*; leave them
dsa cuda fp4 --dsa-prefill-backend triton_sparse_mla
  .*cannot read rows of --kv-cache-layout fp4
dsa cuda fp4 --dtype float16
  --dtype float16 does not work .* use --dtype bfloat16
dsa cuda fp4 --kv-cache-arrangement token_major
  --kv-cache-arrangement token_major does not work with DeepseekV32ForCausalLM: .*; leave it out
dsa cuda bf16 --attention-backend fa3
  --attention-backend fa3 cannot compute .*; leave it out, and
dsa cuda fp4 --prefill-attention-backend fa3 --decode-attention-backend flashmla
  --prefill-attention-backend fa3 and --decode-attention-backend flashmla cannot compute .*; leave them
dsa cuda bf16 --prefill-attention-backend dsa
  .*the decode attention backend, \w+, cannot compute .*leave out --
dsa cuda fp4 EAGLE --speculative-draft-attention-backend fa3
  --speculative-draft-attention-backend fa3 cannot compute the sparse attention
dsa-rank1024 cuda fp4
  .*kv_lora_rank=1024, .* have 704 bytes; .* up to kv_lora_rank 512,
dsa-rank384 cuda fp4
  .*kv_lora_rank=384, .* have 344 bytes; .* multiples of 16 bytes
dsa-kpool cuda fp8
  .*pooled index keys
dsa-sinks cuda fp4
  .*learnable attention sinks.*use --kv-cache-layout bf16
glm5 cuda fp8
  .*flashmla_kv .* layout fp8 .*\(index_kpool above 1\).*use --kv-cache-layout bf16
glm5 cuda fp8_block_scale DSA tilelang tilelang
  .*tilelang .* layout fp8_block_scale .*\(index_kpool above 1\).*use --kv-cache-layout bf16
mha cuda fp4
  .*LlamaForCausalLM uses MHA.*without --kv-cache-layout
"""


def expanded(words):
    """The arguments of a line, from its abbreviations: `DSA` is followed by the two backends' names."""
    argv = [argument for word in words for argument in SHORT.get(word, (word,))]
    if "DSA" in argv:
        at = argv.index("DSA")
        argv[at : at + 3] = pair(*argv[at + 1 : at + 3])
    return argv


def cases():
    """Model, device, layout, arguments and pattern of each line of the tables."""
    for line in re.findall(r"^\w.*\n  .*", DENSE + HOST_TIER + DCP + SPARSE, re.M):
        (model, device, layout, *words), text = line.split("\n")[0].split(), line.split("\n  ")[1]
        yield model, device, layout, expanded(words), text
    for line in FEATURES.split("\n")[1:-1]:
        model, device, layout, *argv = line.split()
        named = re.match(r"--\S+( [^-]\S*)?", " ".join(argv))[0]
        yield model, device, layout, argv, f"{named} does not work with --kv-cache-layout {layout}"
    for line in DCP_CASES.split("\n")[1:-1]:
        model, device, layout, *argv = line.split()
        both = f"--kv-cache-layout {layout} and {' '.join(argv)}: .*; leave out one of"
        yield model, device, layout, [*SHORT["DCP"], *argv], f"--dcp-size 2 does not work with {both}"
