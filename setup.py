"""Packaging. Three top-level packages, listed exactly: what a reader sees is what Python imports.

`specs` and `converters` are short names in a shared site-packages; tests/test_wheel.py fails if another distribution owns them.
"""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="mm-models",
    version="0.1.0",
    description="Vision-language models assembled from components named by model_id, for Megatron-core and FSDP2",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["mm_models", "mm_models.*", "specs", "specs.*", "converters", "converters.*"]),
    py_modules=["pretrain_vlm", "pretrain_fsdp2"],
    package_data={"mm_models": ["**/*.jinja", "**/*.json"]},
    install_requires=[
        "torch>=2.13,<2.14",
        "megatron-core==0.16.1",
        "transformers>=5.24,<5.25",
        "safetensors>=0.5",
        "pydantic>=2.11",
        "rich>=13",
        "pyyaml>=6",
        "numpy>=1.26",
        "pillow>=10",
        "psutil>=5.9",
        "tokenizers>=0.21",
        "jinja2>=3.1",
        "datasets>=5.2",
        "pyarrow>=21",
        "filelock>=3.16",
        "tensorboard>=2.16",
    ],
    extras_require={
        "npu": ["torch_npu==2.13.0"],
        "test": ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "scikit-image>=0.25"],
        "dev": ["ruff>=0.12", "import-linter>=2.3"],
    },
    entry_points={
        "console_scripts": ["mm-convert = mm_models.cli.convert:main", "mm-models = mm_models.cli.models:main"],
    },
)
