"""Command lines: `mm-convert` moves weights, `mm-models` shows what is registered. Nothing heavy is imported at the top."""
