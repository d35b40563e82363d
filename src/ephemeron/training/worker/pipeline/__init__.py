"""The worker of a model that is divided among several functions: one stage each, values between them through the channel."""
