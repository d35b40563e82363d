"""The worker of a model that lies on several functions: one stage each, values between them through the channel."""
