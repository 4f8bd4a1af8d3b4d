"""Weight maps, config maps and converters, one folder per model family. They declare; `mm_models.weights` acts."""
