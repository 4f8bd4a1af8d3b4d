"""The FSDP2 target: the Hugging Face class with our components in it, `fully_shard`, experts in parallel, DCP checkpoints."""
