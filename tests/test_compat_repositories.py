"""What 40 public repositories take from apex, by their newest sources in August 2026, and what resolves."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Repositories that get every name.
COMPLETE = """
    ChenRocks/UNITER deepspeedai/DeepSpeed deepspeedai/Megatron-DeepSpeed EleutherAI/gpt-neox
    facebookresearch/DPR facebookresearch/esm facebookresearch/fairseq facebookresearch/maskrcnn-benchmark
    facebookresearch/SlowFast facebookresearch/suncet facebookresearch/swav facebookresearch/vissl
    facebookresearch/XLM hpcaitech/ColossalAI huggingface/pytorch-image-models jackroos/VL-BERT
    lonePatient/BERT-NER-Pytorch microsoft/CSWin-Transformer microsoft/Oscar microsoft/SimMIM
    microsoft/Swin-Transformer microsoft/unilm mlcommons/training modelscope/modelscope
    NVIDIA-NeMo/Megatron-Bridge NVIDIA/mellotron NVIDIA/pix2pixHD NVIDIA/retinanet-examples
    NVIDIA/semantic-segmentation NVIDIA/tacotron2 NVIDIA/vid2vid NVIDIA/waveglow Sense-X/UniFormer
    SwinTransformer/Swin-Transformer-Object-Detection SwinTransformer/Video-Swin-Transformer
"""

NAMES = """
    amp_C.multi_tensor_axpby amp_C.multi_tensor_l2norm amp_C.multi_tensor_lamb amp_C.multi_tensor_scale
    apex.amp apex.amp._amp_state apex.amp.initialize apex.amp.load_state_dict apex.amp.master_params
    apex.amp.register_half_function apex.amp.scale_loss apex.amp.state_dict
    apex.contrib.clip_grad.clip_grad_norm_ apex.contrib.layer_norm.layer_norm.FastLayerNorm
    apex.contrib.layer_norm.layer_norm.FastLayerNormFN apex.contrib.layer_norm.layer_norm._fast_layer_norm
    apex.contrib.optimizers.FP16_Optimizer apex.contrib.xentropy apex.fp16_utils.network_to_half
    apex.multi_tensor_apply.multi_tensor_applier apex.normalization.FusedLayerNorm
    apex.normalization.FusedRMSNorm apex.normalization.MixedFusedLayerNorm
    apex.normalization.MixedFusedRMSNorm apex.normalization.fused_layer_norm.FusedLayerNorm
    apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction
    apex.normalization.fused_layer_norm.FusedRMSNormAffineFunction
    apex.normalization.fused_layer_norm.MixedFusedLayerNorm
    apex.normalization.fused_layer_norm.fused_layer_norm_affine
    apex.normalization.fused_layer_norm.fused_rms_norm
    apex.normalization.fused_layer_norm.fused_rms_norm_affine apex.optimizers apex.optimizers.FP16_Optimizer
    apex.optimizers.FusedAdam apex.optimizers.FusedLAMB apex.optimizers.FusedMixedPrecisionLamb
    apex.optimizers.FusedNovoGrad apex.optimizers.FusedSGD apex.optimizers.fused_adam.FusedAdam
    apex.optimizers.fused_lamb.FusedLAMB apex.optimizers.fused_mixed_precision_lamb.FusedMixedPrecisionLamb
    apex.parallel.DistributedDataParallel apex.parallel.LARC.LARC apex.parallel.SyncBatchNorm
    apex.parallel.convert_syncbn_model apex.parallel.create_syncbn_process_group
    apex.parallel.distributed.flat_dist_call apex.parallel.optimized_sync_batchnorm.SyncBatchNorm
    apex_C.flatten apex_C.unflatten
"""

LACKING = {  # names that are errors, which say where to read
    "NVIDIA-NeMo/NeMo": """
        amp_C.multi_tensor_unscale_l2norm amp_C.update_scale_hysteresis
        apex._autocast_utils._cast_if_autocast_enabled apex.contrib.group_norm.GroupNorm
        apex.contrib.nccl_allocator apex.contrib.optimizers.distributed_fused_adam.DistributedFusedAdam
        apex.contrib.optimizers.distributed_fused_adam._disable_pre_forward_hook
        apex.contrib.optimizers.distributed_fused_adam._multi_tensor_copy
        apex.transformer.enums.AttnMaskType apex.transformer.functional.fused_softmax.FusedScaleMaskSoftmax
        apex.transformer.parallel_state
    """,
    "NVIDIA/DeepLearningExamples": """
        amp_C.multi_tensor_lamb_stage1_cuda amp_C.multi_tensor_lamb_stage2_cuda apex.mlp.MLP
        apex.mlp.MlpFunction.backward apex.mlp.MlpFunction.forward apex.pyprof
    """,
    "NVIDIA/FasterTransformer": """
        amp_C.multi_tensor_lamb_stage1_cuda amp_C.multi_tensor_lamb_stage2_cuda apex.contrib.sparsity.ASP
    """,
    "NVIDIA/Megatron-LM": "apex.contrib.nccl_allocator",
    "THUDM/SwissArmyTransformer": """
        apex.transformer.enums.AttnMaskType apex.transformer.functional.FusedScaleMaskSoftmax
    """,
}

RESOLVE = """\
import importlib, json, sys
def resolve(name):
    # As `from a.b import c` or `import a.b.c` do; the error's text, or None.
    head, _, last = name.rpartition(".")
    try:
        module = importlib.import_module(head or name)
        head and hasattr(module, last) or importlib.import_module(name)
    except ImportError as error:
        if "not a package" in str(error):  # a name in a class or module
            try:
                getattr(module, last)
            except AttributeError as missing:
                return str(missing)
        return str(error)
print(json.dumps({name: resolve(name) for name in sys.argv[1:]}))
"""


def test_what_repositories_import_resolves(tmp_path):
    (tmp_path / "resolve.py").write_text(RESOLVE)
    lacking = {name for text in LACKING.values() for name in text.split()}
    names = [*NAMES.split(), *lacking]
    command = [sys.executable, "-m", "fastvit.compat", "--prefer", "fastvit", "resolve.py", *names]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    missing = {name: error for name, error in json.loads(done.stdout).items() if error}
    assert missing.keys() == lacking and len(COMPLETE.split()) + len(LACKING) == 40
    for name, error in missing.items():
        assert "docs/migrating-from-apex.md" in error, (name, error)
