"""A program that examines a data set after a tokenizer call, as a training process would: prints the order it found,
and the seconds it took.

python -m tests.data.preprocess_case data.json WORKERS [WORKERS ...]
"""

import hashlib
import sys
import time


def main(path: str, *workers: str) -> None:
    from mm_models.config.data import load_data_config
    from mm_models.data.dataset import ChatDataset
    from mm_models.data.examine import make_processor, make_template

    config = load_data_config(path)
    processor = make_processor(config)
    processor.tokenizer(["threads of the tokenizer start here"] * 100)
    template = make_template(config, processor)
    for count in workers:
        began = time.monotonic()
        config.dataset_param.basic_parameters.__dict__["preprocessing_num_workers"] = int(count)
        samples = list(ChatDataset(config, processor, template))
        digest = hashlib.sha256(repr([(sample.id, sample.ids) for sample in samples]).encode()).hexdigest()
        print(len(samples), digest, f"{time.monotonic() - began:.1f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
