package gated

import (
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"
)

// proxy stands between the driver and the server.
type proxy struct {
	l      net.Listener
	target string

	fakePID bool // as a pooler: its own idea of the backends' pids

	mu      sync.Mutex // guards what follows
	conns   map[net.Conn]bool
	dialed  int
	keys    map[uint32][]byte // what the server said instead of a pid that was made up
	onReply func(typ byte, body []byte) (swallow bool, delay time.Duration)
	onQuery func(typ byte, body []byte) (answer []byte) // nil: forwarded
	wg      sync.WaitGroup
}

func newProxy(t *testing.T, dsn string) *proxy {
	t.Helper()
	u, err := url.Parse(dsn)
	must(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	p := &proxy{l: l, target: u.Host, conns: make(map[net.Conn]bool), keys: make(map[uint32][]byte)}
	p.wg.Go(p.serve)
	t.Cleanup(func() {
		_ = l.Close()
		p.mu.Lock()
		for c := range p.conns {
			_ = c.Close()
		}
		p.conns = nil
		p.mu.Unlock()
		p.wg.Wait()
	})
	return p
}

// through is dsn by way of the proxy.
func (p *proxy) through(dsn string) string {
	u, err := url.Parse(dsn)
	if err != nil {
		panic(err)
	}
	u.Host = p.l.Addr().String()
	return u.String()
}

func (p *proxy) serve() {
	for {
		c, err := p.l.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.handle(c) })
	}
}

func (p *proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns == nil {
		_ = c.Close()
		return false
	}
	p.conns[c] = true
	return true
}

func (p *proxy) drop(c net.Conn) {
	_ = c.Close()
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
}

const cancelRequest = 80877102

func (p *proxy) handle(client net.Conn) {
	if !p.keep(client) {
		return
	}
	defer p.drop(client)
	head, err := packet(client, 0)
	if err != nil {
		return
	}
	server, err := net.Dial("tcp", p.target)
	if err != nil || !p.keep(server) {
		return
	}
	defer p.drop(server)
	if binary.BigEndian.Uint32(head[4:]) == cancelRequest {
		p.mu.Lock()
		if key := p.keys[binary.BigEndian.Uint32(head[8:])]; key != nil {
			copy(head[8:], key)
		}
		p.mu.Unlock()
		_, _ = server.Write(head)
		_, _ = io.Copy(io.Discard, server)
		return
	}
	if _, err := server.Write(head); err != nil {
		return
	}
	p.mu.Lock()
	p.dialed++
	p.mu.Unlock()
	var write sync.Mutex // to the client
	p.wg.Go(func() {
		defer server.Close()
		for {
			m, err := packet(client, 1)
			if err != nil {
				return
			}
			p.mu.Lock()
			hook := p.onQuery
			p.mu.Unlock()
			if hook != nil {
				if answer := hook(m[0], m[5:]); answer != nil {
					write.Lock()
					_, _ = client.Write(answer)
					write.Unlock()
					continue
				}
			}
			if _, err := server.Write(m); err != nil {
				return
			}
		}
	})
	defer client.Close()
	for {
		m, err := packet(server, 1)
		if err != nil {
			return
		}
		if m[0] == 'K' && p.fakePID {
			p.mu.Lock()
			fake := uint32(1_000_000 + len(p.keys))
			p.keys[fake] = append([]byte(nil), m[5:13]...)
			p.mu.Unlock()
			binary.BigEndian.PutUint32(m[5:], fake)
		}
		p.mu.Lock()
		hook := p.onReply
		p.mu.Unlock()
		if hook != nil {
			swallow, delay := hook(m[0], m[5:])
			time.Sleep(delay) // the network, not the test, takes its time
			if swallow {
				continue
			}
		}
		write.Lock()
		_, err = client.Write(m)
		write.Unlock()
		if err != nil {
			return
		}
	}
}

// packet reads one message: skip bytes of type, then its length, which counts itself, and the rest.
func packet(r io.Reader, skip int) ([]byte, error) {
	head := make([]byte, skip+4)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	m := make([]byte, skip+int(binary.BigEndian.Uint32(head[skip:])))
	copy(m, head)
	_, err := io.ReadFull(r, m[len(head):])
	return m, err
}

// reset ends every connection as a network that failed would: with a reset, and without a word to the server.
type resets struct {
	mu    sync.Mutex
	conns []*net.TCPConn
}

func (r *resets) add(c net.Conn) net.Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns = append(r.conns, c.(*net.TCPConn))
	return c
}
