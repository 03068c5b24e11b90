"""A model of transformers that classifies sentences, fine-tuned together by four nodes."""
