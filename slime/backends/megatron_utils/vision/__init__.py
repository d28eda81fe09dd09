"""Models that see: a vision tower in front of the text model, and images on their way into packed micro-batches."""
