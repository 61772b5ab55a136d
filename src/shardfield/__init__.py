"""Train scientific models on fields that no single device can hold."""
