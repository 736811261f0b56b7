"""The Hugging Face Trainer, fed with packed micro batches."""
