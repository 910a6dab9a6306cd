{{/* Egress rules; arguments: root, targets (a list of cidr, except, ports). */}}
{{- define "batchllm.egress" -}}
{{- $dns := .root.Values.networkPolicy.dns -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ $dns.namespace | quote }}
      podSelector:
        matchLabels:
          {{- toYaml $dns.podLabels | nindent 10 }}
  ports:
    {{- range $dns.ports }}
    - {protocol: UDP, port: {{ int64 . }}}
    - {protocol: TCP, port: {{ int64 . }}}
    {{- end }}
{{- with $dns.cidrs }}
- to:
    {{- range . }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}
{{- range .targets }}
- to:
    - ipBlock:
        cidr: {{ .cidr | quote }}
        {{- with .except }}
        except:
          {{- toYaml . | nindent 10 }}
        {{- end }}
  ports:
    {{- range .ports }}
    - {protocol: TCP, port: {{ int64 . }}}
    {{- end }}
{{- end }}
{{- end -}}
