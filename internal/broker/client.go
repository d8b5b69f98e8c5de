package broker

type client struct{}
