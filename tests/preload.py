"""What the forkserver of `tests.harness` imports once. None of these starts a thread at import."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import logging
import warnings

warnings.filterwarnings("ignore", module="megatron")
logging.getLogger("megatron").setLevel(logging.ERROR)

import datasets
import megatron.core.distributed
import megatron.core.optimizer
import megatron.core.pipeline_parallel.schedules
import megatron.core.tensor_parallel
import torch
import transformers.models.glm4v.modeling_glm4v
import transformers.models.glm4v_moe.modeling_glm4v_moe
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
import transformers.models.qwen2_vl.modeling_qwen2_vl

import mm_models.fsdp2.training
import specs.glm4v_moe.fsdp2
