"""Published measurements of training steps and peaks, compared with the models of time and memory."""
