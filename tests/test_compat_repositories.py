"""What 40 public repositories take from apex, by their newest sources in August 2026, and what resolves."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

REPOSITORIES = {
    "ChenRocks/UNITER": "apex.amp apex.normalization.fused_layer_norm.FusedLayerNorm",
    "deepspeedai/DeepSpeed": """
        apex.amp apex.normalization.FusedLayerNorm apex.optimizers.FusedAdam apex_C.flatten
        apex_C.unflatten
    """,
    "deepspeedai/Megatron-DeepSpeed": """
        amp_C.multi_tensor_l2norm amp_C.multi_tensor_scale
        apex.contrib.layer_norm.layer_norm.FastLayerNormFN apex.multi_tensor_apply.multi_tensor_applier
        apex.normalization.MixedFusedRMSNorm
        apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction apex.optimizers.FusedAdam
        apex.optimizers.FusedSGD apex.parallel.SyncBatchNorm
    """,
    "EleutherAI/gpt-neox": """
        apex.contrib.layer_norm.layer_norm.FastLayerNormFN
        apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction
        apex.normalization.fused_layer_norm.FusedRMSNormAffineFunction apex.optimizers.FusedAdam
    """,
    "facebookresearch/DPR": "apex.amp.register_half_function",
    "facebookresearch/esm": "apex.normalization.FusedLayerNorm",
    "facebookresearch/fairseq": """
        amp_C.multi_tensor_l2norm apex.contrib.xentropy apex.multi_tensor_apply.multi_tensor_applier
        apex.normalization.FusedLayerNorm apex.optimizers.FusedAdam apex.optimizers.FusedLAMB
    """,
    "facebookresearch/maskrcnn-benchmark": "apex.amp",
    "facebookresearch/SlowFast": """
        apex.parallel.convert_syncbn_model apex.parallel.create_syncbn_process_group
    """,
    "facebookresearch/suncet": """
        apex.parallel.convert_syncbn_model apex.parallel.create_syncbn_process_group
    """,
    "facebookresearch/swav": """
        apex.amp.initialize apex.amp.scale_loss apex.amp.state_dict apex.parallel.LARC.LARC
        apex.parallel.convert_syncbn_model apex.parallel.create_syncbn_process_group
    """,
    "facebookresearch/vissl": """
        apex.amp.initialize apex.amp.load_state_dict apex.amp.scale_loss apex.parallel.SyncBatchNorm
        apex.parallel.convert_syncbn_model apex.parallel.create_syncbn_process_group
        apex.parallel.optimized_sync_batchnorm.SyncBatchNorm
    """,
    "facebookresearch/XLM": """
        apex.amp.initialize apex.amp.master_params apex.amp.scale_loss
        apex.parallel.DistributedDataParallel
    """,
    "hpcaitech/ColossalAI": """
        apex.amp apex.contrib.layer_norm.layer_norm.FastLayerNorm apex.normalization.FusedLayerNorm
        apex.normalization.FusedRMSNorm apex.normalization.MixedFusedLayerNorm
        apex.normalization.MixedFusedRMSNorm
    """,
    "huggingface/pytorch-image-models": """
        apex.amp apex.normalization.fused_layer_norm.fused_layer_norm_affine
        apex.normalization.fused_layer_norm.fused_rms_norm
        apex.normalization.fused_layer_norm.fused_rms_norm_affine
    """,
    "jackroos/VL-BERT": """
        apex.amp._amp_state apex.normalization.fused_layer_norm.FusedLayerNorm
        apex.parallel.DistributedDataParallel
    """,
    "lonePatient/BERT-NER-Pytorch": "apex.amp",
    "microsoft/CSWin-Transformer": """
        apex.amp apex.parallel.DistributedDataParallel apex.parallel.convert_syncbn_model
    """,
    "microsoft/Oscar": "apex.amp",
    "microsoft/SimMIM": "apex.amp",
    "microsoft/Swin-Transformer": "apex.optimizers.FusedAdam apex.optimizers.FusedLAMB",
    "microsoft/unilm": """
        amp_C.multi_tensor_l2norm apex.amp.initialize apex.amp.load_state_dict
        apex.amp.register_half_function apex.amp.scale_loss apex.amp.state_dict apex.contrib.xentropy
        apex.multi_tensor_apply.multi_tensor_applier apex.normalization.FusedLayerNorm
        apex.normalization.FusedRMSNorm apex.normalization.fused_layer_norm.FusedLayerNorm
        apex.normalization.fused_layer_norm.fused_rms_norm_affine apex.optimizers.FP16_Optimizer
        apex.optimizers.FusedAdam apex.optimizers.FusedLAMB apex.optimizers.FusedNovoGrad
        apex.optimizers.FusedSGD apex.optimizers.fused_lamb.FusedLAMB
        apex.optimizers.fused_mixed_precision_lamb.FusedMixedPrecisionLamb
    """,
    "mlcommons/training": """
        amp_C.multi_tensor_l2norm amp_C.multi_tensor_scale apex.amp
        apex.contrib.layer_norm.layer_norm.FastLayerNormFN apex.multi_tensor_apply.multi_tensor_applier
        apex.optimizers.FusedAdam apex.optimizers.FusedLAMB apex.optimizers.FusedSGD
        apex.parallel.DistributedDataParallel
    """,
    "modelscope/modelscope": """
        amp_C.multi_tensor_l2norm apex.amp apex.normalization.FusedLayerNorm
        apex.normalization.fused_layer_norm.FusedLayerNorm apex.optimizers.FusedAdam
    """,
    "NVIDIA-NeMo/Megatron-Bridge": """
        amp_C.multi_tensor_l2norm apex.multi_tensor_apply.multi_tensor_applier
    """,
    "NVIDIA-NeMo/NeMo": """
        amp_C.multi_tensor_l2norm amp_C.multi_tensor_scale amp_C.multi_tensor_unscale_l2norm
        amp_C.update_scale_hysteresis apex._autocast_utils._cast_if_autocast_enabled
        apex.contrib.group_norm.GroupNorm apex.contrib.layer_norm.layer_norm.FastLayerNorm
        apex.contrib.layer_norm.layer_norm._fast_layer_norm apex.contrib.nccl_allocator
        apex.contrib.optimizers.distributed_fused_adam.DistributedFusedAdam
        apex.contrib.optimizers.distributed_fused_adam._disable_pre_forward_hook
        apex.contrib.optimizers.distributed_fused_adam._multi_tensor_copy
        apex.multi_tensor_apply.multi_tensor_applier apex.normalization.FusedLayerNorm
        apex.normalization.MixedFusedRMSNorm apex.normalization.fused_layer_norm.FusedLayerNorm
        apex.normalization.fused_layer_norm.MixedFusedLayerNorm apex.optimizers.FusedAdam
        apex.optimizers.FusedLAMB apex.transformer.parallel_state
        apex.transformer.enums.AttnMaskType apex.transformer.functional.fused_softmax.FusedScaleMaskSoftmax
    """,
    "NVIDIA/DeepLearningExamples": """
        amp_C.multi_tensor_axpby amp_C.multi_tensor_l2norm amp_C.multi_tensor_lamb
        amp_C.multi_tensor_lamb_stage1_cuda amp_C.multi_tensor_lamb_stage2_cuda amp_C.multi_tensor_scale
        apex.amp._amp_state apex.contrib.clip_grad.clip_grad_norm_
        apex.contrib.optimizers.FP16_Optimizer apex.fp16_utils.network_to_half apex.mlp.MLP
        apex.mlp.MlpFunction.backward apex.mlp.MlpFunction.forward
        apex.multi_tensor_apply.multi_tensor_applier apex.normalization.FusedLayerNorm
        apex.normalization.fused_layer_norm.FusedLayerNorm apex.optimizers.FusedAdam
        apex.optimizers.FusedLAMB apex.optimizers.FusedMixedPrecisionLamb apex.optimizers.FusedNovoGrad
        apex.optimizers.FusedSGD apex.optimizers.fused_adam.FusedAdam
        apex.parallel.DistributedDataParallel apex.parallel.convert_syncbn_model apex.pyprof
    """,
    "NVIDIA/FasterTransformer": """
        amp_C.multi_tensor_l2norm amp_C.multi_tensor_lamb_stage1_cuda
        amp_C.multi_tensor_lamb_stage2_cuda amp_C.multi_tensor_scale apex.amp._amp_state
        apex.contrib.optimizers.FP16_Optimizer apex.contrib.sparsity.ASP
        apex.multi_tensor_apply.multi_tensor_applier
        apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction apex.optimizers.FusedAdam
        apex.optimizers.FusedLAMB apex.parallel.DistributedDataParallel
        apex.parallel.distributed.flat_dist_call apex_C.unflatten
    """,
    "NVIDIA/Megatron-LM": """
        amp_C.multi_tensor_l2norm amp_C.multi_tensor_scale
        apex.contrib.layer_norm.layer_norm.FastLayerNormFN apex.contrib.nccl_allocator
        apex.multi_tensor_apply.multi_tensor_applier
        apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction apex.optimizers.FusedAdam
        apex.optimizers.FusedSGD
    """,
    "NVIDIA/mellotron": "apex.amp",
    "NVIDIA/pix2pixHD": "apex.amp",
    "NVIDIA/retinanet-examples": "apex.amp apex.optimizers apex.parallel.DistributedDataParallel",
    "NVIDIA/semantic-segmentation": """
        apex.amp apex.parallel.DistributedDataParallel apex.parallel.SyncBatchNorm
    """,
    "NVIDIA/tacotron2": "apex.amp",
    "NVIDIA/vid2vid": "apex.amp",
    "NVIDIA/waveglow": "apex.amp",
    "Sense-X/UniFormer": """
        apex.amp.initialize apex.amp.load_state_dict apex.amp.scale_loss apex.amp.state_dict
        apex.normalization.FusedLayerNorm apex.parallel.DistributedDataParallel
        apex.parallel.convert_syncbn_model
    """,
    "SwinTransformer/Swin-Transformer-Object-Detection": """
        apex.amp.initialize apex.amp.load_state_dict apex.amp.scale_loss apex.amp.state_dict
    """,
    "SwinTransformer/Video-Swin-Transformer": """
        apex.amp.initialize apex.amp.load_state_dict apex.amp.scale_loss apex.amp.state_dict
    """,
    "THUDM/SwissArmyTransformer": """
        apex.normalization.fused_layer_norm.FusedLayerNorm apex.transformer.enums.AttnMaskType
        apex.transformer.functional.FusedScaleMaskSoftmax
    """,
}

LACKING = {  # a repository that is not here gets every name; the names here are errors that say where to read
    "NVIDIA-NeMo/NeMo": "amp_C.multi_tensor_unscale amp_C.update_scale_hysteresis apex.transformer "
    "apex.contrib.group_norm apex._autocast_utils apex.contrib.nccl_allocator "
    "apex.contrib.optimizers.distributed_fused_adam",
    "NVIDIA/DeepLearningExamples": "amp_C.multi_tensor_lamb_stage apex.mlp apex.pyprof",
    "NVIDIA/FasterTransformer": "amp_C.multi_tensor_lamb_stage apex.contrib.sparsity",
    "NVIDIA/Megatron-LM": "apex.contrib.nccl_allocator",
    "THUDM/SwissArmyTransformer": "apex.transformer",
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
    names = sorted({name for text in REPOSITORIES.values() for name in text.split()})
    command = [sys.executable, "-m", "fastvit.compat", "--prefer", "fastvit", "resolve.py", *names]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    missing = {name: error for name, error in json.loads(done.stdout).items() if error}
    lacking = {}
    for repository, text in REPOSITORIES.items():
        if found := [name for name in text.split() if name in missing]:
            lacking[repository] = found
    assert len(REPOSITORIES) == 40 and lacking.keys() == LACKING.keys(), lacking
    for repository, found in lacking.items():
        starts = tuple(LACKING[repository].split())
        assert all(name.startswith(starts) for name in found), (repository, found)
    for name, error in missing.items():
        assert "docs/migrating-from-apex.md" in error, (name, error)
