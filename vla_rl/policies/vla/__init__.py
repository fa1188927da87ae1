"""What the policies of vision-language-action models share: the policy around a network, public folders, tokenizers."""
