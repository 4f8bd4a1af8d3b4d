"""mm-models: vision-language models assembled from components named by `model_id`, for Megatron-core and FSDP2."""

__version__ = "0.1.0"
