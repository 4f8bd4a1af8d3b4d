"""PyTorch distributed checkpoints (DCP): one more place where weights live, read and written without torch's pickles."""
