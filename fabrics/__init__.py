"""What is trained on what: models, datasets, evaluation."""
