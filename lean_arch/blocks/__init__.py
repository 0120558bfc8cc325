"""Building blocks: nn.Modules that can be lifted into any code base."""
