"""What detectors of several families share."""
